// The state of the simulated devices: memory, streams, events, injected errors, and the log of what
// programs did wrong.
//
// Objects with static lifetime are allocated and never freed, because the threads of streams may
// outlive the destructors of the process.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))
using std::string;
using Lock = std::unique_lock<std::mutex>;

// Settings: environment variables, read once.
inline long setting(const char* name, long otherwise) {
  const char* value = getenv(name);
  return value && *value ? atol(value) : otherwise;
}

inline thread_local int current_device = 0;
inline thread_local cudaError_t last_error = cudaSuccess;

inline cudaError_t remember(cudaError_t error) { return last_error = error; }

// ---- the log
// ------------------------------------------------------------------------------------- A fault is
// a call that a real device answers with an error or with wrong bytes, whether or not the caller
// looks at the result.
struct Log {
  std::map<string, long> calls, faults, simulated_kernels, unknown_kernels;
};
inline std::mutex& log_mutex = *new std::mutex;
inline Log& call_log = *new Log;

__attribute__((format(printf, 1, 2))) inline void trace(const char* format, ...) {
  static const bool is_on = setting("CUDA_SIM_TRACE", 0);
  if (!is_on) return;
  char text[600];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  fprintf(stderr, "[cuda_sim %d] %s\n", gettid(), text);
}
inline void fault(const string& what) {
  Lock lock(log_mutex);
  if (call_log.faults[what]++ == 0) fprintf(stderr, "[cuda_sim] FAULT %s\n", what.c_str());
}

// ---- injected errors
// -----------------------------------------------------------------------------
struct InjectedError {
  int code;
  long skip, count;  // the first `skip` calls succeed, the next `count` fail
};
inline auto& injected_errors = *new std::map<string, InjectedError>;  // by name of the function

// Count a call, and return the error that it was told to fail with.
inline cudaError_t begin_call(const char* name) {
  Lock lock(log_mutex);
  call_log.calls[name]++;
  auto found = injected_errors.find(name);
  if (found == injected_errors.end() || found->second.count <= 0) return cudaSuccess;
  if (found->second.skip-- > 0) return cudaSuccess;
  found->second.count--;
  trace("%s fails with the injected error %d", name, found->second.code);
  return (cudaError_t)found->second.code;
}
#define BEGIN_CALL \
  if (cudaError_t injected = begin_call(__func__)) return remember(injected)

// ---- device memory
// ------------------------------------------------------------------------------- A device's memory
// is one file that is mapped twice: at the addresses that programs get, which the host must not
// touch, and readable for the simulator.
constexpr size_t ADDRESS_RANGE = 16ull << 30;
constexpr uint64_t FIRST_ADDRESS = 0x600000000000ull;
struct Device {
  char *base, *readable;
  size_t capacity, used = 0;
  std::map<size_t, size_t> allocated, holes;  // offset -> size
  std::atomic<bool> has_context{false};
};
inline std::mutex& memory_mutex = *new std::mutex;
inline std::vector<Device*>& devices() {
  static auto* made = [] {
    auto* made = new std::vector<Device*>;
    for (long i = 0; i < setting("CUDA_SIM_DEVICES", 1); i++) {
      int file = memfd_create("cuda_sim", 0);
      auto* want = (char*)(FIRST_ADDRESS + i * 2 * ADDRESS_RANGE);
      if (ftruncate(file, ADDRESS_RANGE)) abort();
      auto* base = (char*)mmap(want, ADDRESS_RANGE, PROT_NONE,
                               MAP_SHARED | MAP_FIXED_NOREPLACE | MAP_NORESERVE, file, 0);
      auto* readable = (char*)mmap(nullptr, ADDRESS_RANGE, PROT_READ | PROT_WRITE,
                                   MAP_SHARED | MAP_NORESERVE, file, 0);
      if (base != want || readable == MAP_FAILED) {
        perror("[cuda_sim] mmap");
        abort();
      }
      size_t capacity = (size_t)setting("CUDA_SIM_MEMORY_MB", 4096) << 20;
      made->push_back(new Device{base, readable, capacity});
      made->back()->holes[0] = ADDRESS_RANGE;
    }
    return made;
  }();
  return *made;
}
inline int device_count() { return (int)devices().size(); }
inline bool is_device(int i) { return i >= 0 && i < device_count(); }
inline Device& device_at(int i) { return *devices()[i]; }
// The device of an address; -1 for host memory.
inline int device_of(const void* address) {
  for (int i = 0; i < device_count(); i++) {
    auto offset = (char*)address - device_at(i).base;
    if (offset >= 0 && offset < (ptrdiff_t)ADDRESS_RANGE) return i;
  }
  return -1;
}
// The address at which the simulator reads and writes device or host memory.
inline char* readable(const void* address) {
  int i = device_of(address);
  return i < 0 ? (char*)address : device_at(i).readable + ((char*)address - device_at(i).base);
}
inline void create_context(int i) {
  if (!device_at(i).has_context.exchange(true)) trace("context on device %d", i);
}
inline bool is_allocated(const void* address, size_t size) {
  int i = device_of(address);
  if (i < 0) return false;
  Lock lock(memory_mutex);
  auto& device = device_at(i);
  size_t offset = (char*)address - device.base;
  auto found = device.allocated.upper_bound(offset);
  if (found == device.allocated.begin()) return false;
  --found;
  return offset + size <= found->first + found->second;
}

// ---- page-locked host memory, guarded by memory_mutex
// --------------------------------------------
struct LockedRange {
  size_t size;
  bool is_registered;  // by cudaHostRegister, not allocated by cudaHostAlloc
  int device;
};
inline auto& locked_ranges = *new std::map<char*, LockedRange>;
inline size_t locked_bytes = 0;
struct QueuedCopies {
  size_t size;
  int count;
};
inline auto& queued_host_copies = *new std::map<char*, QueuedCopies>;  // by their host address
inline bool is_locked(const void* address, size_t size) {
  Lock lock(memory_mutex);
  auto found = locked_ranges.upper_bound((char*)address);
  if (found == locked_ranges.begin()) return false;
  --found;
  return (char*)address + size <= found->first + found->second.size;
}

// ---- streams and events
// --------------------------------------------------------------------------
inline std::atomic<long> longest_delay_us{setting("CUDA_SIM_DELAY_US", 0)};
inline long random_delay_us() {
  static std::atomic<int> threads{0};
  static thread_local std::mt19937 random(setting("CUDA_SIM_SEED", 1) * 7919 + threads++);
  long most = longest_delay_us;
  return most > 0 ? random() % (most + 1) : 0;
}
inline void sleep_us(long us) {
  if (us > 0) std::this_thread::sleep_for(std::chrono::microseconds(us));
}
// What an event waits for: set by the stream that the event was recorded on.
struct Marker {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_set = false;
  std::chrono::steady_clock::time_point time;
  void set() {
    Lock lock(mutex);
    is_set = true;
    time = std::chrono::steady_clock::now();
    changed.notify_all();
  }
  void wait() {
    Lock lock(mutex);
    changed.wait(lock, [&] { return is_set; });
  }
  bool was_set() {
    Lock lock(mutex);
    return is_set;
  }
};
using MarkerPointer = std::shared_ptr<Marker>;
struct Event {
  int device;
  MarkerPointer last;
};
// A queue with a thread, which starts with the first work and sleeps for a random time before each.
struct Stream {
  int device, priority;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> queue;
  long pushed = 0, done = 0;
  bool is_destroyed = false;

  Stream(int device, int priority) : device(device), priority(priority) {}
  void push(std::function<void()> work) {
    Lock lock(mutex);
    if (!pushed++) std::thread(&Stream::run, this).detach();
    queue.push_back(std::move(work));
    changed.notify_all();
  }
  void run() {
    pthread_setname_np(pthread_self(), "cuda_sim");
    Lock lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return !queue.empty() || is_destroyed; });
      if (queue.empty()) break;
      auto work = std::move(queue.front());
      queue.pop_front();
      lock.unlock();
      sleep_us(random_delay_us());
      work();
      work = nullptr;
      lock.lock();
      done++;
      changed.notify_all();
    }
    lock.unlock();
    delete this;
  }
  // Wait for the work that is queued now, not for what other threads queue meanwhile.
  void wait() {
    Lock lock(mutex);
    changed.wait(lock, [&, upto = pushed] { return done >= upto; });
  }
  bool is_idle() {
    Lock lock(mutex);
    return done == pushed;
  }
  void destroy() {
    Lock lock(mutex);
    is_destroyed = true;
    changed.notify_all();
    if (!pushed) {
      lock.unlock();
      delete this;
    }
  }
};
inline std::mutex& handle_mutex = *new std::mutex;
inline auto& streams = *new std::set<Stream*>;
inline auto& events = *new std::set<Event*>;

inline Stream* new_stream(int device, int priority) {
  auto* made = new Stream(device, priority);
  Lock lock(handle_mutex);
  streams.insert(made);
  return made;
}
inline Stream* default_stream(int device) {
  static std::mutex& mutex = *new std::mutex;
  static auto& made = *new std::map<int, Stream*>;
  Lock lock(mutex);
  auto& stream = made[device];
  if (!stream) stream = new_stream(device, 0);
  return stream;
}
// A null handle is the default stream of the current device, as are the handles 1 and 2.
inline Stream* stream_of(cudaStream_t handle) {
  if ((uintptr_t)handle <= 2) {
    create_context(current_device);
    return default_stream(current_device);
  }
  Lock lock(handle_mutex);
  return streams.count((Stream*)handle) ? (Stream*)handle : nullptr;
}
inline Event* event_of(cudaEvent_t handle) {
  Lock lock(handle_mutex);
  return events.count((Event*)handle) ? (Event*)handle : nullptr;
}
inline MarkerPointer marker_of(Event* event) {
  Lock lock(handle_mutex);
  return event->last;
}
#define FIND(kind, name, handle)                     \
  auto* name = kind##_of(handle);                    \
  if (!name) {                                       \
    fault(string(__func__) + ": invalid " #kind);    \
    return remember(cudaErrorInvalidResourceHandle); \
  }

// Wait for all streams of a device; -1: of all devices.
inline void wait_for_device(int device) {
  std::vector<Stream*> waited;
  {
    Lock lock(handle_mutex);
    for (auto* stream : streams)
      if (device < 0 || stream->device == device) waited.push_back(stream);
  }
  for (auto* stream : waited) stream->wait();
}
