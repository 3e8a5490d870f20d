/* Copies bytes and takes their crc32c on the way, in one pass over memory.
 *
 * A load that verifies has to read every byte, write it, and run a checksum over it. Done as
 * read(2) and then a checksum, the destination is fetched into the cache only to be overwritten,
 * and is read once more. Here the bytes come from a mapping of the file, go to the destination by
 * stores that bypass the cache, and are folded into the checksum while they are in registers.
 *
 * The checksum is folded as in V. Gopal et al., "Fast CRC Computation for Generic Polynomials
 * Using PCLMULQDQ Instruction" (Intel, 2009), for the reflected Castagnoli polynomial; its constants
 * are computed here. What is left after folding is a short message of the same checksum, which the
 * crc32 instruction finishes.
 *
 * Built where there is a compiler; shardstore/storage/mapped.py does without it where there is none.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#if !defined(__x86_64__) || !defined(__linux__)
#error "only for Linux on x86-64; the package works without this module"
#endif

#include <immintrin.h>

#define WITH_CRC __attribute__((target("sse4.2,pclmul")))
#define WITH_WIDE __attribute__((target("avx512f,avx512vl,avx512bw,vpclmulqdq,pclmul,sse4.2")))

enum { LINE = 64, AHEAD = 2048, WIDE_BLOCK = 4 * 64, NARROW_BLOCK = 8 * 16 };

/* What multiplies the lower and the upper half of 128 bits that move on by one block. */
struct factors {
    uint64_t low, high;
};

/* Takes whole blocks, at least one, to a destination at a multiple of LINE. */
typedef uint32_t kernel_fn(struct factors by, uint32_t crc, uint8_t *to, const uint8_t *from,
                           size_t bytes);

/* x to the power n modulo the Castagnoli polynomial, bits reflected. */
static uint64_t power_of_x(unsigned n)
{
    uint32_t value = 0x80000000u;
    while (n--)
        value = (value >> 1) ^ (value & 1 ? 0x82F63B78u : 0);
    return value;
}

/* The crc32c register carried over bytes, without its inversions. */
WITH_CRC static uint32_t carry(uint32_t crc, const uint8_t *from, size_t bytes)
{
    uint64_t value = crc;
    for (; bytes >= 8; from += 8, bytes -= 8) {
        uint64_t word;
        memcpy(&word, from, 8);
        value = _mm_crc32_u64(value, word);
    }
    crc = (uint32_t)value;
    for (; bytes; bytes--)
        crc = _mm_crc32_u8(crc, *from++);
    return crc;
}

WITH_WIDE static uint32_t copy_wide(struct factors by, uint32_t crc, uint8_t *to,
                                    const uint8_t *from, size_t bytes)
{
    enum { LANES = WIDE_BLOCK / 64 };
    const __m512i factor =
        _mm512_broadcast_i32x4(_mm_set_epi64x((long long)by.high, (long long)by.low));
    __m512i state[LANES];
    uint8_t rest[WIDE_BLOCK];

#pragma GCC unroll 4
    for (int i = 0; i < LANES; i++) {
        state[i] = _mm512_loadu_si512(from + 64 * i);
        _mm512_stream_si512((__m512i *)(to + 64 * i), state[i]);
    }
    state[0] = _mm512_xor_si512(state[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)crc)));
    for (size_t at = WIDE_BLOCK; at < bytes; at += WIDE_BLOCK) {
#pragma GCC unroll 4
        for (int i = 0; i < LANES; i++) {
            const uint8_t *source = from + at + 64 * i;
            _mm_prefetch((const char *)source + AHEAD, _MM_HINT_T0);
            __m512i next = _mm512_loadu_si512(source);
            _mm512_stream_si512((__m512i *)(to + at + 64 * i), next);
            state[i] = _mm512_ternarylogic_epi64(
                _mm512_clmulepi64_epi128(state[i], factor, 0x00),
                _mm512_clmulepi64_epi128(state[i], factor, 0x11), next, 0x96);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < LANES; i++)
        _mm512_storeu_si512(rest + 64 * i, state[i]);
    return carry(0, rest, WIDE_BLOCK);
}

WITH_CRC static uint32_t copy_narrow(struct factors by, uint32_t crc, uint8_t *to,
                                     const uint8_t *from, size_t bytes)
{
    enum { LANES = NARROW_BLOCK / 16 };
    const __m128i factor = _mm_set_epi64x((long long)by.high, (long long)by.low);
    __m128i state[LANES];
    uint8_t rest[NARROW_BLOCK];

#pragma GCC unroll 8
    for (int i = 0; i < LANES; i++) {
        state[i] = _mm_loadu_si128((const __m128i *)(from + 16 * i));
        _mm_stream_si128((__m128i *)(to + 16 * i), state[i]);
    }
    state[0] = _mm_xor_si128(state[0], _mm_cvtsi32_si128((int)crc));
    for (size_t at = NARROW_BLOCK; at < bytes; at += NARROW_BLOCK) {
        _mm_prefetch((const char *)from + at + AHEAD, _MM_HINT_T0);
        _mm_prefetch((const char *)from + at + AHEAD + LINE, _MM_HINT_T0);
#pragma GCC unroll 8
        for (int i = 0; i < LANES; i++) {
            __m128i next = _mm_loadu_si128((const __m128i *)(from + at + 16 * i));
            _mm_stream_si128((__m128i *)(to + at + 16 * i), next);
            state[i] = _mm_xor_si128(
                _mm_xor_si128(_mm_clmulepi64_si128(state[i], factor, 0x00),
                              _mm_clmulepi64_si128(state[i], factor, 0x11)),
                next);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < LANES; i++)
        _mm_storeu_si128((__m128i *)(rest + 16 * i), state[i]);
    return carry(0, rest, NARROW_BLOCK);
}

/* The best one first. */
static struct kernel {
    const char *name;
    size_t block;
    kernel_fn *run;
    struct factors by;
} kernels[] = {
    {"avx512", WIDE_BLOCK, copy_wide, {0, 0}},
    {"pclmul", NARROW_BLOCK, copy_narrow, {0, 0}},
};
enum { KERNELS = sizeof kernels / sizeof *kernels };

static const struct kernel *best;

static int supported(int which)
{
    if (!__builtin_cpu_supports("sse4.2") || !__builtin_cpu_supports("pclmul"))
        return 0;
    return kernels[which].run != copy_wide ||
           (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
            __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("vpclmulqdq"));
}

/* Copies, at any alignment, and returns the crc32c that continues `crc`. */
static uint32_t copy_crc(const struct kernel *kernel, uint32_t crc, uint8_t *to, const uint8_t *from,
                         size_t bytes)
{
    size_t head = (size_t)(-(uintptr_t)to) % LINE, whole;

    crc = ~crc;
    if (head > bytes)
        head = bytes;
    memcpy(to, from, head);
    crc = carry(crc, from, head);
    to += head, from += head, bytes -= head;
    whole = bytes - bytes % kernel->block;
    if (whole) {
        crc = kernel->run(kernel->by, crc, to, from, whole);
        _mm_sfence();
    }
    memcpy(to + whole, from + whole, bytes - whole);
    return ~carry(crc, from + whole, bytes - whole);
}

/* Whether all pages of a mapping are in memory; 0 also where the kernel does not say. */
static int resident(void *mapping, size_t bytes)
{
    enum { AT_ONCE = 4096 };
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    unsigned char there[AT_ONCE];

    for (size_t at = 0; at < bytes; at += AT_ONCE * page) {
        size_t piece = bytes - at < AT_ONCE * page ? bytes - at : AT_ONCE * page;
        if (mincore((uint8_t *)mapping + at, piece, there))
            return 0;
        for (size_t i = 0; i * page < piece; i++)
            if (!(there[i] & 1))
                return 0;
    }
    return 1;
}

static PyObject *py_copy_crc32c(PyObject *self, PyObject *args)
{
    Py_buffer from, to;
    unsigned long crc = 0;
    const char *name = NULL;
    const struct kernel *kernel = best;

    if (!PyArg_ParseTuple(args, "y*w*|kz", &from, &to, &crc, &name))
        return NULL;
    for (int i = 0; name && i < KERNELS; i++)
        if (!strcmp(name, kernels[i].name) && supported(i))
            kernel = &kernels[i], name = NULL;
    if (name)
        PyErr_Format(PyExc_ValueError, "no kernel %s on this processor", name);
    else if (from.len != to.len)
        PyErr_Format(PyExc_ValueError, "%zd bytes do not go into %zd", from.len, to.len);
    if (!PyErr_Occurred()) {
        Py_BEGIN_ALLOW_THREADS
        crc = copy_crc(kernel, (uint32_t)crc, to.buf, from.buf, (size_t)from.len);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&from);
    PyBuffer_Release(&to);
    return PyErr_Occurred() ? NULL : PyLong_FromUnsignedLong(crc);
}

static PyObject *py_read_resident(PyObject *self, PyObject *args)
{
    Py_buffer to, tail;
    int fd, read = 0;
    uint32_t crc = 0;

    if (!PyArg_ParseTuple(args, "iw*w*", &fd, &to, &tail))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    size_t bytes = (size_t)to.len + (size_t)tail.len;
    uint8_t *mapping = bytes ? mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0) : MAP_FAILED;
    if (mapping != MAP_FAILED) {
        if (resident(mapping, bytes)) {
            crc = copy_crc(best, 0, to.buf, mapping, (size_t)to.len);
            memcpy(tail.buf, mapping + to.len, (size_t)tail.len);
            read = 1;
        }
        munmap(mapping, bytes);
    }
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&to);
    PyBuffer_Release(&tail);
    if (!read)
        Py_RETURN_NONE;
    return PyLong_FromUnsignedLong(crc);
}

static PyMethodDef methods[] = {
    {"copy_crc32c", py_copy_crc32c, METH_VARARGS,
     "copy_crc32c(source, target, crc=0, kernel=None): copies all bytes; the crc32c carried on."},
    {"read_resident", py_read_resident, METH_VARARGS,
     "read_resident(fd, target, tail): fills both from the file's start, which must have as many "
     "bytes; the crc32c of what went to target, None where not all of it was in memory."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_copy_crc", "Copies with a checksum taken on the way.", -1, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__copy_crc(void)
{
    PyObject *self, *names;

    names = PyList_New(0);
    for (int i = KERNELS; names && i--;)
        if (supported(i)) {
            PyObject *name = PyUnicode_FromString(kernels[i].name);
            unsigned bits = (unsigned)kernels[i].block * 8;
            kernels[i].by = (struct factors){power_of_x(bits + 31), power_of_x(bits - 33)};
            best = &kernels[i];
            if (!name || PyList_Append(names, name))
                Py_CLEAR(names);
            Py_XDECREF(name);
        }
    if (!names)
        return NULL;
    if (!best) {
        Py_DECREF(names);
        PyErr_SetString(PyExc_ImportError, "this processor has no carry-less multiplication");
        return NULL;
    }
    self = PyModule_Create(&module);
    if (!self || PyModule_AddObjectRef(self, "KERNELS", names))
        Py_CLEAR(self);
    Py_DECREF(names);
    return self;
}
