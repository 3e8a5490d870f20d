// A simulated CUDA runtime, libcudart.so.13, on host memory and threads. README.md says what it
// simulates and what not. Functions that are not here are stubs, which report and refuse.
#include "kernels.h"
#include "state.h"

// ---- devices
// -------------------------------------------------------------------------------------
API cudaError_t cudaGetDeviceCount(int* count) {
  BEGIN_CALL;
  *count = device_count();
  return cudaSuccess;
}
API cudaError_t cudaGetDevice(int* i) {
  *i = current_device;
  return cudaSuccess;
}
API cudaError_t cudaSetDevice(int i) {
  BEGIN_CALL;
  if (!is_device(i)) return remember(cudaErrorInvalidDevice);
  current_device = i;
  create_context(i);  // since CUDA 12
  return cudaSuccess;
}
API cudaError_t cudaDeviceSynchronize() {
  BEGIN_CALL;
  create_context(current_device);
  wait_for_device(current_device);
  return cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
API cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }
API cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
API cudaError_t cudaPeekAtLastError() { return last_error; }
API const char* cudaGetErrorName(cudaError_t error) {
  static const std::map<int, const char*> names = {
      {0, "cudaSuccess"},
      {1, "cudaErrorInvalidValue"},
      {2, "cudaErrorMemoryAllocation"},
      {400, "cudaErrorInvalidResourceHandle"},
      {600, "cudaErrorNotReady"},
      {712, "cudaErrorHostMemoryAlreadyRegistered"},
      {713, "cudaErrorHostMemoryNotRegistered"},
      {719, "cudaErrorLaunchFailure"},
      {801, "cudaErrorNotSupported"},
  };
  auto found = names.find(error);
  return found == names.end() ? "cudaErrorOther" : found->second;
}
API const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "out of memory" : cudaGetErrorName(error);
}
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int i) {
  BEGIN_CALL;
  if (!is_device(i)) return remember(cudaErrorInvalidDevice);
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "Simulated device %d", i);
  memset(&p->uuid, i + 1, 16);
  p->totalGlobalMem = device_at(i).capacity;
  p->major = 9;
  p->multiProcessorCount = 132;
  p->warpSize = 32;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxBlocksPerMultiProcessor = 32;
  p->maxGridSize[0] = p->memPitch = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = 232448;
  p->sharedMemPerMultiprocessor = 233472;
  p->l2CacheSize = 50 << 20;
  p->textureAlignment = 512;
  p->asyncEngineCount = 3;
  p->pciBusID = i + 1;
  p->unifiedAddressing = p->canMapHostMemory = p->concurrentKernels = 1;
  p->hostRegisterSupported = p->streamPrioritiesSupported = 1;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int i) {
  BEGIN_CALL;
  cudaDeviceProp p;
  if (auto error = cudaGetDeviceProperties(&p, i)) return error;
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = p.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = p.sharedMemPerBlock; break;
    case cudaDevAttrWarpSize: *value = p.warpSize; break;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrHostRegisterSupported: *value = 1; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int i) {
  snprintf(text, size, "0000:%02x:00.0", i + 1);
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -1;
  return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) {
  return remember(cudaErrorNotSupported);
}

// ---- device memory
// -------------------------------------------------------------------------------
API cudaError_t cudaMalloc(void** address, size_t wanted) {
  BEGIN_CALL;
  create_context(current_device);
  *address = nullptr;
  if (!wanted) return cudaSuccess;
  size_t size = (wanted + 511) & ~511ull;
  Lock lock(memory_mutex);
  auto& device = device_at(current_device);
  if (device.used + size > device.capacity) return remember(cudaErrorMemoryAllocation);
  for (auto [offset, length] : device.holes) {
    if (length < size) continue;
    device.holes.erase(offset);
    if (length > size) device.holes[offset + size] = length - size;
    device.allocated[offset] = size;
    device.used += size;
    memset(device.readable + offset, 0xCD, size);
    *address = device.base + offset;
    return cudaSuccess;
  }
  return remember(cudaErrorMemoryAllocation);
}
API cudaError_t cudaFree(void* address) {
  BEGIN_CALL;
  create_context(current_device);
  if (!address) return cudaSuccess;
  int i = device_of(address);
  if (i >= 0) wait_for_device(i);
  Lock lock(memory_mutex);
  size_t offset = i < 0 ? 0 : (char*)address - device_at(i).base;
  if (i < 0 || !device_at(i).allocated.count(offset)) {
    fault("cudaFree of a wrong pointer");
    return remember(cudaErrorInvalidValue);
  }
  auto& device = device_at(i);
  size_t size = device.allocated[offset];
  device.allocated.erase(offset);
  device.used -= size;
  madvise(device.readable + offset, size & ~4095ull, MADV_REMOVE);
  auto hole = device.holes.emplace(offset, size).first;
  if (auto next = std::next(hole); next != device.holes.end() && next->first == offset + size) {
    hole->second += next->second;
    device.holes.erase(next);
  }
  if (hole != device.holes.begin()) {
    auto before = std::prev(hole);
    if (before->first + before->second == offset) {
      before->second += hole->second;
      device.holes.erase(hole);
    }
  }
  return cudaSuccess;
}
API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  BEGIN_CALL;
  create_context(current_device);
  Lock lock(memory_mutex);
  *total = device_at(current_device).capacity;
  *free = *total - device_at(current_device).used;
  return cudaSuccess;
}

// ---- page-locked host memory
// ---------------------------------------------------------------------
API cudaError_t cudaHostAlloc(void** address, size_t size, unsigned) {
  BEGIN_CALL;
  create_context(current_device);
  *address = nullptr;
  if (!size) return cudaSuccess;
  void* made = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (made == MAP_FAILED) return remember(cudaErrorMemoryAllocation);
  Lock lock(memory_mutex);
  locked_ranges[(char*)made] = {size, false, current_device};
  locked_bytes += size;
  *address = made;
  return cudaSuccess;
}
API cudaError_t cudaFreeHost(void* address) {
  BEGIN_CALL;
  if (!address) return cudaSuccess;
  wait_for_device(-1);
  Lock lock(memory_mutex);
  auto found = locked_ranges.find((char*)address);
  if (found == locked_ranges.end() || found->second.is_registered) {
    fault("cudaFreeHost of a wrong pointer");
    return remember(cudaErrorInvalidValue);
  }
  locked_bytes -= found->second.size;
  munmap(address, found->second.size);
  locked_ranges.erase(found);
  return cudaSuccess;
}
API cudaError_t cudaHostRegister(void* address, size_t size, unsigned) {
  BEGIN_CALL;
  create_context(current_device);
  if (!address || !size) return remember(cudaErrorInvalidValue);
  auto* start = (char*)address;
  Lock lock(memory_mutex);
  auto next = locked_ranges.lower_bound(start);
  bool overlaps = next != locked_ranges.end() && next->first < start + size;
  if (next != locked_ranges.begin()) {
    auto before = std::prev(next);
    overlaps |= before->first + before->second.size > start;
  }
  if (overlaps) return remember(cudaErrorHostMemoryAlreadyRegistered);
  locked_ranges[start] = {size, true, current_device};
  locked_bytes += size;
  return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void* address) {
  BEGIN_CALL;
  auto* start = (char*)address;
  Lock lock(memory_mutex);
  auto found = locked_ranges.find(start);
  if (found == locked_ranges.end() || !found->second.is_registered) {
    fault("cudaHostUnregister of memory that is not registered");
    return remember(cudaErrorHostMemoryNotRegistered);
  }
  auto queued = queued_host_copies.lower_bound(start);
  if (queued != queued_host_copies.end() && queued->first < start + found->second.size)
    fault("cudaHostUnregister of memory with queued copies");
  locked_bytes -= found->second.size;
  locked_ranges.erase(found);
  return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* address) {
  BEGIN_CALL;
  memset(a, 0, sizeof *a);
  int i = device_of(address);
  if (i >= 0) {
    a->type = is_allocated(address, 1) ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
    a->device = i;
    a->devicePointer = (void*)address;
  } else if (is_locked(address, 1)) {
    Lock lock(memory_mutex);
    a->type = cudaMemoryTypeHost;
    a->device = std::prev(locked_ranges.upper_bound((char*)address))->second.device;
    a->devicePointer = a->hostPointer = (void*)address;
  } else {
    a->type = cudaMemoryTypeUnregistered;
    a->device = -2;
  }
  return cudaSuccess;
}

// ---- copies
// -------------------------------------------------------------------------------------- Slowly, so
// that a copy that is used too early is torn.
static void copy_in_pieces(char* target, const char* source, size_t size) {
  size_t piece = size > (64 << 10) && random_delay_us() ? size / 8 + 1 : size;
  for (size_t start = 0; start < size; start += piece) {
    if (start) sleep_us(random_delay_us() / 4);
    memcpy(target + start, source + start, std::min(piece, size - start));
  }
}
static bool require_allocated(const char* function, const void* address, size_t size) {
  if (device_of(address) < 0 || is_allocated(address, size)) return true;
  fault(string(function) + ": device memory that is not allocated");
  return false;
}
static cudaError_t copy(const char* function, void* target, const void* source, size_t size,
                        cudaMemcpyKind kind, Stream* stream, bool waits) {
  if (!size) return cudaSuccess;
  if (!require_allocated(function, target, size) || !require_allocated(function, source, size))
    return remember(cudaErrorInvalidValue);
  bool to_device = device_of(target) >= 0, from_device = device_of(source) >= 0;
  if ((kind == cudaMemcpyHostToDevice && (from_device || !to_device)) ||
      (kind == cudaMemcpyDeviceToHost && (!from_device || to_device)) ||
      (kind == cudaMemcpyDeviceToDevice && !(from_device && to_device))) {
    fault(string(function) + ": the kind of copy does not fit the pointers");
    return remember(cudaErrorInvalidValue);
  }
  char *into = readable(target), *from = readable(source);
  if (!to_device && !from_device) {
    stream->wait();
    memcpy(into, from, size);
  } else if (!from_device && !is_locked(source, size)) {  // pageable: read during the call
    auto held = std::make_shared<string>((const char*)source, size);
    stream->push([=] { copy_in_pieces(into, held->data(), size); });
  } else if (to_device && from_device) {
    stream->push([=] { copy_in_pieces(into, from, size); });
  } else {
    char* on_host = to_device ? from : into;
    {
      Lock lock(memory_mutex);
      auto& queued = queued_host_copies[on_host];
      queued = {size, queued.count + 1};
    }
    stream->push([=] {
      copy_in_pieces(into, from, size);
      Lock lock(memory_mutex);
      if (!--queued_host_copies[on_host].count) queued_host_copies.erase(on_host);
    });
    waits |= !to_device && !is_locked(target, size);  // pageable
  }
  if (waits) stream->wait();
  return cudaSuccess;
}
API cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t size, cudaMemcpyKind kind,
                                cudaStream_t handle) {
  BEGIN_CALL;
  FIND(stream, stream, handle);
  return copy(__func__, target, source, size, kind, stream, false);
}
API cudaError_t cudaMemcpy(void* target, const void* source, size_t size, cudaMemcpyKind kind) {
  BEGIN_CALL;
  return copy(__func__, target, source, size, kind, stream_of(0), true);
}
API cudaError_t cudaMemcpyPeerAsync(void* target, int, const void* source, int, size_t size,
                                    cudaStream_t handle) {
  BEGIN_CALL;
  FIND(stream, stream, handle);
  return copy(__func__, target, source, size, cudaMemcpyDefault, stream, false);
}
API cudaError_t cudaMemcpy2DAsync(void* target, size_t target_pitch, const void* source,
                                  size_t source_pitch, size_t width, size_t height,
                                  cudaMemcpyKind kind, cudaStream_t handle) {
  BEGIN_CALL;
  FIND(stream, stream, handle);
  for (size_t row = 0; row < height; row++)
    if (auto error = copy(__func__, (char*)target + row * target_pitch,
                          (const char*)source + row * source_pitch, width, kind, stream, false))
      return error;
  return cudaSuccess;
}
API cudaError_t cudaMemsetAsync(void* target, int value, size_t size, cudaStream_t handle) {
  BEGIN_CALL;
  FIND(stream, stream, handle);
  if (!require_allocated(__func__, target, size)) return remember(cudaErrorInvalidValue);
  stream->push([=, into = readable(target)] { memset(into, value, size); });
  return cudaSuccess;
}
API cudaError_t cudaMemset(void* target, int value, size_t size) {
  auto error = cudaMemsetAsync(target, value, size, 0);
  stream_of(0)->wait();
  return error;
}

// ---- streams
// -------------------------------------------------------------------------------------
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned, int priority) {
  BEGIN_CALL;
  create_context(current_device);
  *handle = (cudaStream_t)new_stream(current_device, priority);
  return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned flags) {
  return cudaStreamCreateWithPriority(handle, flags, 0);
}
API cudaError_t cudaStreamCreate(cudaStream_t* handle) {
  return cudaStreamCreateWithPriority(handle, 0, 0);
}
API cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  BEGIN_CALL;
  FIND(stream, stream, handle);
  {
    Lock lock(handle_mutex);
    streams.erase(stream);
  }
  stream->destroy();
  return cudaSuccess;
}
API cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  FIND(stream, stream, handle);
  *priority = stream->priority;
  return cudaSuccess;
}
API cudaError_t cudaStreamQuery(cudaStream_t handle) {
  BEGIN_CALL;
  FIND(stream, stream, handle);
  return stream->is_idle() ? cudaSuccess : remember(cudaErrorNotReady);
}
API cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  BEGIN_CALL;
  FIND(stream, stream, handle);
  stream->wait();
  return cudaSuccess;
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned) {
  BEGIN_CALL;
  FIND(stream, stream, handle);
  FIND(event, event, event_handle);
  if (auto marker = marker_of(event)) stream->push([=] { marker->wait(); });
  return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status,
                                         unsigned long long* id, cudaGraph_t* graph,
                                         const cudaGraphNode_t** nodes,
                                         const cudaGraphEdgeData** edges, size_t* count) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  if (graph) *graph = nullptr;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  static thread_local auto current = cudaStreamCaptureModeGlobal;
  std::swap(current, *mode);
  return cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* argument) {
  BEGIN_CALL;
  FIND(stream, stream, handle);
  stream->push([=] { function(argument); });
  return cudaSuccess;
}
API cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t function,
                                      void* argument, unsigned) {
  BEGIN_CALL;
  FIND(stream, stream, handle);
  stream->push([=] { function(handle, cudaSuccess, argument); });
  return cudaSuccess;
}

// ---- events
// --------------------------------------------------------------------------------------
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned) {
  BEGIN_CALL;
  create_context(current_device);
  auto* made = new Event{current_device, nullptr};
  Lock lock(handle_mutex);
  events.insert(made);
  *handle = (cudaEvent_t)made;
  return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* handle) { return cudaEventCreateWithFlags(handle, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  BEGIN_CALL;
  FIND(event, event, handle);
  Lock lock(handle_mutex);
  events.erase(event);
  delete event;
  return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event_handle, cudaStream_t handle, unsigned) {
  BEGIN_CALL;
  FIND(event, event, event_handle);
  FIND(stream, stream, handle);
  if (event->device != stream->device) {
    fault("cudaEventRecord: the event and the stream are of different devices");
    return remember(cudaErrorInvalidResourceHandle);
  }
  auto marker = std::make_shared<Marker>();
  {
    Lock lock(handle_mutex);
    event->last = marker;
  }
  stream->push([=] { marker->set(); });
  return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}
API cudaError_t cudaEventQuery(cudaEvent_t handle) {
  BEGIN_CALL;
  FIND(event, event, handle);
  auto marker = marker_of(event);
  return !marker || marker->was_set() ? cudaSuccess : remember(cudaErrorNotReady);
}
API cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  BEGIN_CALL;
  FIND(event, event, handle);
  if (auto marker = marker_of(event)) marker->wait();
  return cudaSuccess;
}
API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start_handle, cudaEvent_t end_handle) {
  BEGIN_CALL;
  FIND(event, start, start_handle);
  FIND(event, end, end_handle);
  auto first = marker_of(start), last = marker_of(end);
  if (!first || !last) return remember(cudaErrorInvalidResourceHandle);
  if (!first->was_set() || !last->was_set()) return remember(cudaErrorNotReady);
  *ms = std::chrono::duration<float, std::milli>(last->time - first->time).count();
  return cudaSuccess;
}

// ---- kernels
// -------------------------------------------------------------------------------------
static std::mutex& kernel_mutex = *new std::mutex;
static auto& kernel_names = *new std::unordered_map<const void*, const char*>;
struct LaunchConfiguration {
  dim3 grid, block;
  size_t shared_memory;
  cudaStream_t stream;
};
static thread_local std::vector<LaunchConfiguration> launch_configurations;

API void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API char __cudaInitModule(void**) { return 1; }
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*,
                                uint3*, dim3*, dim3*, int*) {
  Lock lock(kernel_mutex);
  kernel_names[function] = name;
}
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared,
                                         cudaStream_t stream) {
  launch_configurations.push_back({grid, block, shared, stream});
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  auto& last = launch_configurations.back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared_memory;
  *(cudaStream_t*)stream = last.stream;
  launch_configurations.pop_back();
  return cudaSuccess;
}
API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}
API cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void** args, size_t,
                                 cudaStream_t handle) {
  BEGIN_CALL;
  FIND(stream, stream, handle);
  if (current_device != stream->device) {
    fault("a kernel on a stream of another device than the current one");
    return remember(cudaErrorInvalidResourceHandle);
  }
  const char* name;
  {
    Lock lock(kernel_mutex);
    auto found = kernel_names.find(function);
    name = found == kernel_names.end() ? "?" : found->second;
  }
  auto work = simulated_kernel(name, args);
  if (!work) fault(string("a kernel that is not simulated: ") + name);
  {
    Lock lock(log_mutex);
    (work ? call_log.simulated_kernels : call_log.unknown_kernels)[name]++;
  }
  stream->push(work ? work : [] {});
  return cudaSuccess;
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** args,
                                   size_t shared, cudaStream_t stream) {
  return cudaLaunchKernel((const void*)kernel, grid, block, args, shared, stream);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* how, const void* function,
                                    void** args) {
  return cudaLaunchKernel(function, how->gridDim, how->blockDim, args, 0, how->stream);
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void*, int,
                                                                       size_t, unsigned) {
  *count = 2;
  return cudaSuccess;
}
API cudaError_t cudaProfilerStart() { return cudaSuccess; }
API cudaError_t cudaProfilerStop() { return cudaSuccess; }

// ---- the driver
// ---------------------------------------------------------------------------------- The context of
// device i is the handle i + 1.
static CUcontext context_of(int i) { return (CUcontext)(uintptr_t)(i + 1); }
API CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "simulated driver error";
  return CUDA_SUCCESS;
}
API CUresult cuLogsRegisterCallback(CUlogsCallback, void*, CUlogsCallbackHandle*) {
  return CUDA_SUCCESS;
}
API CUresult cuLogsUnregisterCallback(CUlogsCallbackHandle) { return CUDA_SUCCESS; }
API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
API CUresult cuDeviceGet(CUdevice* device, int i) {
  *device = i;
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute, CUdevice) {
  *value = 0;
  return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxGetState(CUdevice i, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = is_device(i) && device_at(i).has_context;
  return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice i) {
  create_context(i);
  *context = context_of(i);
  return CUDA_SUCCESS;
}
API CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = device_at(current_device).has_context ? context_of(current_device) : nullptr;
  return CUDA_SUCCESS;
}
API CUresult cuCtxSetCurrent(CUcontext context) {
  if (context) current_device = (int)(uintptr_t)context - 1;
  return CUDA_SUCCESS;
}
API CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute,
                                   CUdeviceptr address) {
  int i = device_of((void*)address);
  if (attribute != CU_POINTER_ATTRIBUTE_CONTEXT || i < 0) return CUDA_ERROR_INVALID_VALUE;
  *(CUcontext*)value = context_of(i);
  return CUDA_SUCCESS;
}
static CUresult missing_driver_function() {
  fault("a driver function that is not simulated");
  return CUDA_ERROR_NOT_SUPPORTED;
}
API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                                 unsigned long long,
                                                 cudaDriverEntryPointQueryResult* status) {
  Dl_info self;
  dladdr((void*)&cuInit, &self);
  void* library = dlopen(self.dli_fname, RTLD_NOLOAD | RTLD_NOW);
  *function = library ? dlsym(library, name) : nullptr;
  if (!*function) *function = (void*)&missing_driver_function;
  if (status) *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
#include "stubs.inc"

// ---- what tests call
// -----------------------------------------------------------------------------
API void cuda_sim_fail(const char* function, int code, long skip, long count) {
  Lock lock(log_mutex);
  injected_errors[function] = {code, skip, count};
}
API void cuda_sim_delay(long us) { longest_delay_us = us; }
API long cuda_sim_faults() {
  Lock lock(log_mutex);
  long total = 0;
  for (auto& [what, count] : call_log.faults) total += count;
  return total;
}
API int cuda_sim_has_context(int i) { return device_at(i).has_context; }
API long cuda_sim_locked_ranges() {
  Lock lock(memory_mutex);
  return locked_ranges.size();
}
API long cuda_sim_registered_ranges() {
  Lock lock(memory_mutex);
  long total = 0;
  for (auto& [address, range] : locked_ranges) total += range.is_registered;
  return total;
}
API long cuda_sim_queued_copies() {
  Lock lock(memory_mutex);
  return queued_host_copies.size();
}
API long cuda_sim_events() {
  Lock lock(handle_mutex);
  return events.size();
}
__attribute__((destructor)) static void report() {
  if (!setting("CUDA_SIM_REPORT", 0) || !call_log.calls.count("cudaGetDeviceCount")) return;
  fprintf(stderr, "[cuda_sim] %zu page-locked ranges of %zu bytes\n", locked_ranges.size(),
          locked_bytes);
  for (auto& [what, count] : call_log.faults)
    fprintf(stderr, "[cuda_sim] fault x%ld: %s\n", count, what.c_str());
  for (auto& [name, count] : call_log.unknown_kernels)
    fprintf(stderr, "[cuda_sim] kernel without effect x%ld: %.300s\n", count, name.c_str());
  for (auto& [name, count] : call_log.simulated_kernels)
    fprintf(stderr, "[cuda_sim] simulated kernel x%ld: %.120s\n", count, name.c_str());
}
