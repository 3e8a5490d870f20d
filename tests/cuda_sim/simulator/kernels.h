// Kernels, recognised by their mangled names in PyTorch's build: fills, copies with and without
// strides, float32 to bfloat16, casts, and sleep. Their arguments lie as PyTorch's templates of
// this version lay them out; see `elements_of` and the offsets below.
#pragma once
#include "state.h"

// Size in bytes of a mangled C++ type; 0 if it is not known.
static size_t size_of_mangled(const char* type) {
  static const std::vector<std::pair<const char*, size_t>> known = {{"N3c108BFloat16E", 2},
                                                                    {"N3c104HalfE", 2},
                                                                    {"N3c107complexIfE", 8},
                                                                    {"N3c107complexIdE", 16},
                                                                    {"N3c1013Float8_e4m3fnE", 1},
                                                                    {"N3c1015Float8_e4m3fnuzE", 1},
                                                                    {"N3c1011Float8_e5m2E", 1},
                                                                    {"N3c1015Float8_e5m2fnuzE", 1},
                                                                    {"f", 4},
                                                                    {"d", 8},
                                                                    {"h", 1},
                                                                    {"a", 1},
                                                                    {"b", 1},
                                                                    {"s", 2},
                                                                    {"t", 2},
                                                                    {"i", 4},
                                                                    {"j", 4},
                                                                    {"l", 8},
                                                                    {"m", 8}};
  for (auto& [name, size] : known)
    if (!strncmp(type, name, strlen(name))) return size;
  return 0;
}
static uint16_t to_bfloat16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;  // NaN
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
static float from_bfloat16(uint16_t half) {
  uint32_t bits = (uint32_t)half << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// at::cuda::detail::OffsetCalculator for N operands.
template <int N>
struct OffsetCalculator {
  int dims;
  struct {
    uint32_t divisor, magic, shift;
  } sizes[25];
  uint32_t strides[25][N];  // in bytes
  void offsets_of(uint32_t element, size_t* offsets) const {
    for (int operand = 0; operand < N; operand++) offsets[operand] = 0;
    for (int d = 0; d < dims; d++) {
      uint32_t index = element % sizes[d].divisor;
      element /= sizes[d].divisor;
      for (int operand = 0; operand < N; operand++)
        offsets[operand] += (size_t)index * strides[d][operand];
    }
  }
};

// c10::ScalarType, by number.
static int size_of_scalar(int type) {
  static const int sizes[] = {1, 1, 2, 4, 8, 2, 4, 8, 4, 8, 16, 1, 1, 1, 4, 2};
  return type < 16 ? sizes[type] : 0;
}
static double load_scalar(const char* p, int type) {
  switch (type) {
    case 0: return *(uint8_t*)p;
    case 1: return *(int8_t*)p;
    case 2: return *(int16_t*)p;
    case 3: return *(int32_t*)p;
    case 4: return *(int64_t*)p;
    case 5: return (double)*(_Float16*)p;
    case 6: return *(float*)p;
    case 7: return *(double*)p;
    case 11: return *(bool*)p;
    case 15: return from_bfloat16(*(uint16_t*)p);
    default: fault("cast from a data type that is not simulated"); return 0;
  }
}
static void store_scalar(char* p, int type, double value) {
  switch (type) {
    case 0: *(uint8_t*)p = value; break;
    case 1: *(int8_t*)p = value; break;
    case 2: *(int16_t*)p = value; break;
    case 3: *(int32_t*)p = value; break;
    case 4: *(int64_t*)p = value; break;
    case 5: *(_Float16*)p = value; break;
    case 6: *(float*)p = value; break;
    case 7: *(double*)p = value; break;
    case 11: *(bool*)p = value != 0; break;
    case 15: *(uint16_t*)p = to_bfloat16(value); break;
    default: fault("cast to a data type that is not simulated");
  }
}

using Work = std::function<void()>;

static Work fill(const char* name, const char* type, int count, void** args) {
  size_t size = size_of_mangled(type);
  if (!size) return nullptr;
  if (strstr(name, "gpu_kernel_impl_nocast")) {
    OffsetCalculator<1> where;
    char* target;
    memcpy(&where, args[1], sizeof where);
    memcpy(&target, (char*)args[1] + 408, 8);
    string value((char*)args[1] + 416, size);
    target = readable(target);
    return [=] {
      size_t offset[1];
      for (int i = 0; i < count; i++) {
        where.offsets_of(i, offset);
        memcpy(target + offset[0], value.data(), size);
      }
    };
  }
  string value((char*)args[1], size);
  char* address = *(char**)args[2];
  if (!is_allocated(address, count * size)) fault("fill of device memory that is not allocated");
  char* target = readable(address);
  return [=] {
    for (int i = 0; i < count; i++) memcpy(target + i * size, value.data(), size);
  };
}

static Work copy_elements(const char* name, int count, void** args) {
  bool to_bf16 = strstr(name, "bfloat16_copy_kernel_cuda");
  // The element type is that of the last lambda in the name.
  const char* type = nullptr;
  for (const char* p = name; (p = strstr(p, "EUl")); p++)
    if (p[3] != 'v' && p[3] != 'i') type = p + 3;
  if (const char* p = strstr(name, "EUliE_"); p && !type) type = p + 3;
  size_t size = type ? size_of_mangled(type) : 0;
  if (!size) return nullptr;
  auto copy_one = [=](char* target, const char* source) {
    if (!to_bf16) {
      memcpy(target, source, size);
      return;
    }
    float value;
    memcpy(&value, source, 4);
    uint16_t half = to_bfloat16(value);
    memcpy(target, &half, 2);
  };
  if (strstr(name, "gpu_kernel_impl_nocast")) {
    OffsetCalculator<2> where;
    char* data[2];
    memcpy(&where, args[1], sizeof where);
    memcpy(data, (char*)args[1] + 504, 16);
    char *target = readable(data[0]), *source = readable(data[1]);
    return [=] {
      size_t offset[2];
      for (int i = 0; i < count; i++) {
        where.offsets_of(i, offset);
        copy_one(target + offset[0], source + offset[1]);
      }
    };
  }
  char** data = (char**)args[2];
  char *target = readable(data[0]), *source = readable(data[1]);
  if (strstr(name, "vectorized_elementwise_kernelI")) {
    size_t target_size = to_bf16 ? 2 : size;
    return [=] {
      for (int i = 0; i < count; i++) copy_one(target + i * target_size, source + i * size);
    };
  }
  if (strstr(name, "unrolled_elementwise_kernelI") && strstr(name, "LoadWithCast")) {
    int from = *(int8_t*)args[5], to = *(int8_t*)args[6];
    return [=] {
      for (size_t i = 0; i < (size_t)count; i++)
        store_scalar(target + i * size_of_scalar(to), to,
                     load_scalar(source + i * size_of_scalar(from), from));
    };
  }
  return nullptr;
}

// The work of a kernel; none if it is not simulated.
static Work simulated_kernel(const char* name, void** args) {
  if (strstr(name, "spin_kernel")) {
    long cycles = *(int64_t*)args[0];  // of 1 ns
    return [=] { sleep_us(cycles / 1000); };
  }
  int count = args ? *(int*)args[0] : 0;
  if (const char* functor = strstr(name, "FillFunctorI"))
    return fill(name, functor + strlen("FillFunctorI"), count, args);
  for (const char* copy :
       {"direct_copy_kernel_cuda", "float8_copy_kernel_cuda", "bfloat16_copy_kernel_cuda"})
    if (strstr(name, copy)) return copy_elements(name, count, args);
  return nullptr;
}
