/* Reads chunk files: copies the bytes and computes their crc32c in one pass over memory.
 *
 * read(2) and a checksum afterwards fetch the destination into the cache only to overwrite it, and read it
 * once more. Here a piece of the file is read into memory that stays in the cache; from there its bytes are
 * folded into the checksum in registers and go to the destination by stores that bypass the cache.
 *
 * The checksum is folded as in V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using
 * PCLMULQDQ Instruction" (Intel, 2009), for the reflected Castagnoli polynomial. What is left after folding
 * is a short message of the same checksum, which the crc32 instruction finishes.
 *
 * Optional: shardstore/storage/movers/checksums.py imports it where it could be built.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#if !defined(__x86_64__) || !defined(__linux__)
#error "only for Linux on x86-64; the package works without this module"
#endif

#include <fcntl.h>
#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define WITH_CRC __attribute__((target("sse4.2,pclmul")))
#define WITH_WIDE __attribute__((target("avx512f,avx512vl,avx512bw,vpclmulqdq,pclmul,sse4.2")))
#define INLINE static inline __attribute__((always_inline))

enum { CRC_BYTES = 4, LINE = 64, AHEAD = 2048 /* distance of prefetches */ };
enum { WIDE_BLOCK = 4 * 64, NARROW_BLOCK = 8 * 16 }; /* bytes that a kernel folds at a time */
enum {
    PIECE_BYTES = 256 * 1024, /* read at a time: a part of the second-level cache */
    STEP_BYTES = 16 * 1024,   /* checksummed, then copied to rows: a part of the first-level cache */
};

/* Factors of the lower and the upper half of 128 bits that move on by one block. */
struct factors {
    uint64_t low, high;
};

/* Folds whole blocks, at least one, and copies them to `to`, a multiple of LINE, unless it is NULL. */
typedef uint32_t kernel_fn(struct factors by, uint32_t crc, uint8_t *to, const uint8_t *from, size_t bytes);

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

WITH_WIDE INLINE uint32_t fold_wide(struct factors by, uint32_t crc, uint8_t *to, const uint8_t *from,
                                    size_t bytes)
{
    enum { LANES = WIDE_BLOCK / 64 };
    const __m512i factor = _mm512_broadcast_i32x4(_mm_set_epi64x((long long)by.high, (long long)by.low));
    __m512i state[LANES];
    uint8_t rest[WIDE_BLOCK];

#pragma GCC unroll 4
    for (int i = 0; i < LANES; i++) {
        state[i] = _mm512_loadu_si512(from + 64 * i);
        if (to)
            _mm512_stream_si512((__m512i *)(to + 64 * i), state[i]);
    }
    state[0] = _mm512_xor_si512(state[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)crc)));
    for (size_t at = WIDE_BLOCK; at < bytes; at += WIDE_BLOCK) {
#pragma GCC unroll 4
        for (int i = 0; i < LANES; i++) {
            const uint8_t *source = from + at + 64 * i;
            _mm_prefetch((const char *)source + AHEAD, _MM_HINT_T0);
            __m512i next = _mm512_loadu_si512(source);
            if (to)
                _mm512_stream_si512((__m512i *)(to + at + 64 * i), next);
            state[i] = _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(state[i], factor, 0x00),
                                                 _mm512_clmulepi64_epi128(state[i], factor, 0x11), next,
                                                 0x96);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < LANES; i++)
        _mm512_storeu_si512(rest + 64 * i, state[i]);
    return carry(0, rest, WIDE_BLOCK);
}

WITH_CRC INLINE uint32_t fold_narrow(struct factors by, uint32_t crc, uint8_t *to, const uint8_t *from,
                                     size_t bytes)
{
    enum { LANES = NARROW_BLOCK / 16 };
    const __m128i factor = _mm_set_epi64x((long long)by.high, (long long)by.low);
    __m128i state[LANES];
    uint8_t rest[NARROW_BLOCK];

#pragma GCC unroll 8
    for (int i = 0; i < LANES; i++) {
        state[i] = _mm_loadu_si128((const __m128i *)(from + 16 * i));
        if (to)
            _mm_stream_si128((__m128i *)(to + 16 * i), state[i]);
    }
    state[0] = _mm_xor_si128(state[0], _mm_cvtsi32_si128((int)crc));
    for (size_t at = NARROW_BLOCK; at < bytes; at += NARROW_BLOCK) {
        _mm_prefetch((const char *)from + at + AHEAD, _MM_HINT_T0);
        _mm_prefetch((const char *)from + at + AHEAD + LINE, _MM_HINT_T0);
#pragma GCC unroll 8
        for (int i = 0; i < LANES; i++) {
            __m128i next = _mm_loadu_si128((const __m128i *)(from + at + 16 * i));
            if (to)
                _mm_stream_si128((__m128i *)(to + at + 16 * i), next);
            state[i] = _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(state[i], factor, 0x00),
                                                   _mm_clmulepi64_si128(state[i], factor, 0x11)),
                                     next);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < LANES; i++)
        _mm_storeu_si128((__m128i *)(rest + 16 * i), state[i]);
    return carry(0, rest, NARROW_BLOCK);
}

/* Each kernel twice: with the copy, and without it. */
WITH_WIDE static uint32_t run_wide(struct factors by, uint32_t crc, uint8_t *to, const uint8_t *from,
                                   size_t bytes)
{
    return to ? fold_wide(by, crc, to, from, bytes) : fold_wide(by, crc, NULL, from, bytes);
}

WITH_CRC static uint32_t run_narrow(struct factors by, uint32_t crc, uint8_t *to, const uint8_t *from,
                                    size_t bytes)
{
    return to ? fold_narrow(by, crc, to, from, bytes) : fold_narrow(by, crc, NULL, from, bytes);
}

/* The best one first. */
static struct kernel {
    const char *name;
    size_t block;
    kernel_fn *run;
    struct factors by;
} kernels[] = {
    {"avx512", WIDE_BLOCK, run_wide, {0, 0}},
    {"pclmul", NARROW_BLOCK, run_narrow, {0, 0}},
};
enum { KERNELS = sizeof kernels / sizeof *kernels };

static int supported(const struct kernel *kernel)
{
    if (!__builtin_cpu_supports("sse4.2") || !__builtin_cpu_supports("pclmul"))
        return 0;
    return kernel->run != run_wide ||
           (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
            __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("vpclmulqdq"));
}

/* Copies to any address, unless `to` is NULL, and carries the checksum on. */
static uint32_t copy_crc(const struct kernel *kernel, uint32_t crc, uint8_t *to, const uint8_t *from,
                         size_t bytes)
{
    size_t head = (size_t)(-(uintptr_t)to) % LINE;

    crc = ~crc;
    if (head > bytes)
        head = bytes;
    if (head) {
        memcpy(to, from, head);
        crc = carry(crc, from, head);
        to += head, from += head, bytes -= head;
    }
    const size_t whole = bytes - bytes % kernel->block;
    if (whole)
        crc = kernel->run(kernel->by, crc, to, from, whole);
    if (to)
        memcpy(to + whole, from + whole, bytes - whole);
    return ~carry(crc, from + whole, bytes - whole);
}

/* Where the next bytes go: NULL, memory without gaps (`run` is 0), or rows of `run` bytes. */
struct target {
    uint8_t *at;
    size_t left, run; /* bytes of this row that are still to come; bytes of a row */
    Py_ssize_t gap;   /* from the end of a row to the start of the next */
};

/* Describes a buffer; 0 where its elements lie neither without gaps nor in evenly spaced rows. */
static int describe(const Py_buffer *view, struct target *to)
{
    Py_ssize_t run = view->itemsize, rows = 1, stride = 0;
    int axis = view->ndim - 1;

    *to = (struct target){.at = view->buf};
    if (PyBuffer_IsContiguous(view, 'C'))
        return 1;
    for (; axis >= 0 && (view->shape[axis] == 1 || view->strides[axis] == run); axis--)
        run *= view->shape[axis];
    for (; axis >= 0; axis--) {
        if (view->shape[axis] == 1)
            continue;
        if (rows == 1)
            stride = view->strides[axis];
        else if (view->strides[axis] != stride * rows)
            return 0;
        rows *= view->shape[axis];
    }
    to->left = to->run = (size_t)run;
    to->gap = stride - run;
    return 1;
}

/* Copies a part of a row: past the cache where it is whole lines. */
static void copy_run(uint8_t *to, const uint8_t *from, size_t bytes)
{
    if (((uintptr_t)to | bytes) % LINE) {
        memcpy(to, from, bytes);
        return;
    }
    for (size_t at = 0; at < bytes; at += 16)
        _mm_stream_si128((__m128i *)(to + at), _mm_loadu_si128((const __m128i *)(from + at)));
}

/* Takes the next bytes to their destination and carries the checksum over them. */
static uint32_t take(const struct kernel *kernel, uint32_t crc, struct target *to, const uint8_t *from,
                     size_t bytes)
{
    if (!to->run) {
        crc = copy_crc(kernel, crc, to->at, from, bytes);
        to->at += to->at ? bytes : 0;
        return crc;
    }
    while (bytes) {
        size_t step = bytes < STEP_BYTES ? bytes : STEP_BYTES;
        crc = copy_crc(kernel, crc, NULL, from, step);
        for (bytes -= step; step;) {
            const size_t size = to->left < step ? to->left : step;
            copy_run(to->at, from, size);
            from += size, step -= size, to->at += size, to->left -= size;
            if (!to->left)
                to->at += to->gap, to->left = to->run;
        }
    }
    return crc;
}

/* Reads a file of `bytes` and a checksum; 0 if there is none of just that size. */
static int read_file(const char *name, const struct kernel *kernel, struct target *to, size_t bytes,
                     uint32_t *crc, uint32_t *stored)
{
    _Alignas(LINE) uint8_t piece[PIECE_BYTES];
    struct stat about;
    size_t at = 0, size = 0, tail = 0;
    int fd = open(name, O_RDONLY | O_CLOEXEC);

    if (fd < 0)
        return 0;
    if (!fstat(fd, &about) && (size_t)about.st_size == bytes + CRC_BYTES)
        for (; !tail; at += size) {
            size = bytes - at < PIECE_BYTES ? bytes - at : PIECE_BYTES;
            tail = at + size == bytes ? CRC_BYTES : 0;
            const struct iovec parts[] = {{piece, size}, {stored, tail}};
            if (preadv(fd, parts, 2, (off_t)at) != (ssize_t)(size + tail)) {
                tail = 0;
                break;
            }
            *crc = take(kernel, *crc, to, piece, size);
        }
    _mm_sfence(); /* after the stores that bypass the cache */
    close(fd);
    return tail != 0;
}

static PyObject *read_chunk(PyObject *self, PyObject *args)
{
    PyObject *path, *target = Py_None;
    const struct kernel *kernel = kernels;
    const char *name = NULL;
    struct target to = {0};
    uint32_t crc = 0, stored = 0;
    Py_buffer view;
    Py_ssize_t bytes;
    int done = 0;

    if (!PyArg_ParseTuple(args, "O&n|Oz", PyUnicode_FSConverter, &path, &bytes, &target, &name))
        return NULL;
    while (kernel < kernels + KERNELS && !(supported(kernel) && (!name || !strcmp(name, kernel->name))))
        kernel++;
    const char *file = PyBytes_AsString(path);
    if (kernel == kernels + KERNELS)
        PyErr_Format(PyExc_ValueError, "no kernel %s on this processor", name);
    else if (target == Py_None || !PyObject_GetBuffer(target, &view, PyBUF_STRIDED | PyBUF_WRITABLE)) {
        if (target != Py_None && view.len != bytes)
            PyErr_Format(PyExc_ValueError, "%zd bytes do not go into %zd", bytes, view.len);
        else if (target == Py_None || describe(&view, &to)) {
            Py_BEGIN_ALLOW_THREADS
            done = read_file(file, kernel, &to, (size_t)bytes, &crc, &stored);
            Py_END_ALLOW_THREADS
        }
        if (target != Py_None)
            PyBuffer_Release(&view);
    }
    Py_DECREF(path);
    if (PyErr_Occurred())
        return NULL;
    return done ? Py_BuildValue("kk", (unsigned long)crc, (unsigned long)stored) : Py_NewRef(Py_None);
}

static PyMethodDef methods[] = {
    {"read_chunk", read_chunk, METH_VARARGS, "read_chunk(path, size, target=None, kernel=None): see the stub."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_copy_crc", NULL, -1, methods};

PyMODINIT_FUNC PyInit__copy_crc(void)
{
    PyObject *self = NULL, *names = PyList_New(0);

    for (struct kernel *kernel = kernels; names && kernel < kernels + KERNELS; kernel++) {
        const unsigned bits = (unsigned)kernel->block * 8;
        PyObject *name = PyUnicode_FromString(kernel->name);
        kernel->by = (struct factors){power_of_x(bits + 31), power_of_x(bits - 33)};
        if (!name || (supported(kernel) && PyList_Append(names, name)))
            Py_CLEAR(names);
        Py_XDECREF(name);
    }
    if (names && !PyList_Size(names))
        PyErr_SetString(PyExc_ImportError, "this processor has no carry-less multiplication");
    else if (names && (self = PyModule_Create(&module)) && PyModule_AddObjectRef(self, "KERNELS", names))
        Py_CLEAR(self);
    Py_XDECREF(names);
    return self;
}
