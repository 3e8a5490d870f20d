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
 * Built where there is a compiler; shardstore/storage/whole_file.py does without it where there is none.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>

#if !defined(__x86_64__) || !defined(__linux__)
#error "only for Linux on x86-64; the package works without this module"
#endif

#include <immintrin.h>

#define WITH_CRC __attribute__((target("sse4.2,pclmul")))
#define WITH_WIDE __attribute__((target("avx512f,avx512vl,avx512bw,vpclmulqdq,pclmul,sse4.2")))

enum { LINE = 64, AHEAD = 2048, WIDE_BLOCK = 4 * 64, NARROW_BLOCK = 8 * 16 };
/* Of a file, below which setting up a mapping costs more than it spares. */
enum { MIN_MAPPED_BYTES = 128 * 1024 };
enum { SPREAD_BYTES = 16 * 1024, MOST_AXES = 64 };
/* The system call's number on x86-64: headers may be older than the kernel. */
enum { CACHESTAT = 451 };

/* What multiplies the lower and the upper half of 128 bits that move on by one block. */
struct factors {
    uint64_t low, high;
};

/* Takes whole blocks, at least one, to a destination at a multiple of LINE; to none if it is NULL. */
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

WITH_WIDE static inline __attribute__((always_inline)) uint32_t
fold_wide(struct factors by, uint32_t crc, uint8_t *to, const uint8_t *from, size_t bytes)
{
    enum { LANES = WIDE_BLOCK / 64 };
    const __m512i factor =
        _mm512_broadcast_i32x4(_mm_set_epi64x((long long)by.high, (long long)by.low));
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

WITH_CRC static inline __attribute__((always_inline)) uint32_t
fold_narrow(struct factors by, uint32_t crc, uint8_t *to, const uint8_t *from, size_t bytes)
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

WITH_WIDE static uint32_t run_wide(struct factors by, uint32_t crc, uint8_t *to,
                                   const uint8_t *from, size_t bytes)
{
    return to ? fold_wide(by, crc, to, from, bytes) : fold_wide(by, crc, NULL, from, bytes);
}

WITH_CRC static uint32_t run_narrow(struct factors by, uint32_t crc, uint8_t *to,
                                    const uint8_t *from, size_t bytes)
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

static const struct kernel *best;

static int supported(int which)
{
    if (!__builtin_cpu_supports("sse4.2") || !__builtin_cpu_supports("pclmul"))
        return 0;
    return kernels[which].run != run_wide ||
           (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
            __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("vpclmulqdq"));
}

/* Copies, at any alignment, and carries the checksum on. `to` may be NULL, for the checksum alone. */
static uint32_t copy_crc(const struct kernel *kernel, uint32_t crc, uint8_t *to,
                         const uint8_t *from, size_t bytes)
{
    size_t head = (size_t)(-(uintptr_t)to) % LINE, whole;

    crc = ~crc;
    if (head > bytes)
        head = bytes;
    if (head) {
        memcpy(to, from, head);
        crc = carry(crc, from, head);
        to += head, from += head, bytes -= head;
    }
    whole = bytes - bytes % kernel->block;
    if (whole) {
        crc = kernel->run(kernel->by, crc, to, from, whole);
        if (to)
            _mm_sfence();
    }
    if (to)
        memcpy(to + whole, from + whole, bytes - whole);
    return ~carry(crc, from + whole, bytes - whole);
}

/* A run to a place of its own: past the cache where it fills whole lines. */
static void copy_run(uint8_t *to, const uint8_t *from, size_t bytes)
{
    if (((uintptr_t)to | bytes) % LINE) {
        memcpy(to, from, bytes);
        return;
    }
    for (size_t at = 0; at < bytes; at += 16)
        _mm_stream_si128((__m128i *)(to + at), _mm_loadu_si128((const __m128i *)(from + at)));
}

/* Spreads bytes over a buffer whose last axis is contiguous, in C order; their checksum. */
static uint32_t spread_crc(const struct kernel *kernel, const Py_buffer *to, const uint8_t *from)
{
    int axes = to->ndim - 1;
    size_t run = (size_t)to->shape[axes];
    Py_ssize_t index[MOST_AXES] = {0};
    uint8_t *row = to->buf;
    uint32_t crc = 0;

    if (!to->len)
        return 0;
    while (axes && to->strides[axes - 1] == (Py_ssize_t)run)
        run *= (size_t)to->shape[--axes];
    /* A few runs at a time, so that those that were checksummed are copied out of the cache. */
    const size_t runs = (size_t)to->len / run, at_once = run < SPREAD_BYTES ? SPREAD_BYTES / run : 1;
    for (size_t done = 0; done < runs;) {
        size_t now = runs - done < at_once ? runs - done : at_once;
        crc = copy_crc(kernel, crc, NULL, from, now * run);
        for (done += now; now--; from += run) {
            copy_run(row, from, run);
            for (int axis = axes; axis--;) {
                row += to->strides[axis];
                if (++index[axis] < to->shape[axis])
                    break;
                row -= to->strides[axis] * to->shape[axis];
                index[axis] = 0;
            }
        }
    }
    _mm_sfence();
    return crc;
}

/* How many pages of a file's start are in memory, by cachestat(2) of Linux 6.5; -1 without it. */
static long long pages_cached(int fd, size_t bytes)
{
    struct {
        uint64_t offset, length;
    } range = {0, bytes};
    struct {
        uint64_t cached, dirty, writeback, evicted, recently_evicted;
    } found = {0};

    return syscall(CACHESTAT, fd, &range, &found, 0) ? -1 : (long long)found.cached;
}

/* Whether a file system lies on a disk or in the memory of this machine: a file that another machine
 * deletes may vanish from under a mapping, which kills the process where read(2) returns an error.
 * Numbers as statfs(2) gives them (Linux man-pages). */
static int on_this_machine(int fd)
{
    static const uint32_t known[] = {
        0xEF53,     /* ext2, ext3, ext4 */
        0x58465342, /* xfs */
        0x9123683E, /* btrfs */
        0xF2F52010, /* f2fs */
        0x2FC12FC1, /* zfs */
        0x01021994, /* tmpfs */
        0x794C7630, /* overlayfs */
    };
    struct statfs about;

    if (fstatfs(fd, &about))
        return 0;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if ((uint32_t)about.f_type == known[i])
            return 1;
    return 0;
}

/* Whether all of a file's start is in memory; 0 also where the kernel does not say. */
static int resident(int fd, void *mapping, size_t bytes)
{
    enum { AT_ONCE = 4096 };
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const long long cached = pages_cached(fd, bytes);
    unsigned char there[AT_ONCE];

    if (!on_this_machine(fd))
        return 0;
    if (cached >= 0)
        return (size_t)cached >= (bytes + page - 1) / page;
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

/* Reads into both buffers what small files have; 0 where it came up short. */
static int read_small(int fd, const Py_buffer *to, const Py_buffer *tail)
{
    struct iovec parts[] = {{to->buf, (size_t)to->len}, {tail->buf, (size_t)tail->len}};

    return preadv(fd, parts, 2, 0) == (ssize_t)(to->len + tail->len);
}

/* Copies a file that is in memory; 0 where it is not. */
static int read_mapped(int fd, const Py_buffer *to, int dense, const Py_buffer *tail, uint32_t *crc)
{
    const size_t bytes = (size_t)(to->len + tail->len);
    uint8_t *mapping = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);
    int there = 0;

    if (mapping == MAP_FAILED)
        return 0;
    if (resident(fd, mapping, bytes)) {
        *crc = dense ? copy_crc(best, 0, to->buf, mapping, (size_t)to->len)
                     : spread_crc(best, to, mapping);
        memcpy(tail->buf, mapping + to->len, (size_t)tail->len);
        there = 1;
    }
    munmap(mapping, bytes);
    return there;
}

/* Gives back what a call about a file was given; the crc32c, or None where there is none. */
static PyObject *answer(PyObject *path, Py_buffer *tail, int done, uint32_t crc)
{
    PyBuffer_Release(tail);
    Py_DECREF(path);
    if (PyErr_Occurred())
        return NULL;
    if (!done)
        Py_RETURN_NONE;
    return PyLong_FromUnsignedLong(crc);
}

static PyObject *py_read_file(PyObject *self, PyObject *args)
{
    PyObject *path = NULL, *target;
    Py_buffer to, tail;
    int done = 0;
    uint32_t crc = 0;

    if (!PyArg_ParseTuple(args, "O&Ow*", PyUnicode_FSConverter, &path, &target, &tail)) {
        Py_XDECREF(path);
        return NULL;
    }
    if (PyObject_GetBuffer(target, &to, PyBUF_STRIDED | PyBUF_WRITABLE)) {
        PyBuffer_Release(&tail);
        Py_DECREF(path);
        return NULL;
    }
    const int dense = PyBuffer_IsContiguous(&to, 'C');
    const char *name = PyBytes_AsString(path);
    if (to.itemsize != 1 || (!dense && (to.ndim > MOST_AXES || to.strides[to.ndim - 1] != 1))) {
        PyErr_SetString(PyExc_ValueError, "the target has to be of bytes, along its last axis "
                                          "one behind the other");
    } else if (name) {
        Py_BEGIN_ALLOW_THREADS
        struct stat about;
        int fd = open(name, O_RDONLY | O_CLOEXEC);
        if (fd >= 0) {
            if (!fstat(fd, &about) && about.st_size == to.len + tail.len) {
                if (dense && to.len < MIN_MAPPED_BYTES) {
                    done = read_small(fd, &to, &tail);
                    crc = done ? copy_crc(best, 0, NULL, to.buf, (size_t)to.len) : 0;
                } else {
                    done = read_mapped(fd, &to, dense, &tail, &crc);
                }
            }
            close(fd);
        }
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&to);
    return answer(path, &tail, done, crc);
}

/* The checksum of all of a file but its tail; 0 where the file is large and not in memory. */
static int checksum(int fd, size_t bytes, const Py_buffer *tail, uint32_t *crc)
{
    const size_t all = bytes + (size_t)tail->len;
    int there = 0;

    if (all < MIN_MAPPED_BYTES) {
        uint8_t *data = malloc(all ? all : 1);
        if (data && pread(fd, data, all, 0) == (ssize_t)all) {
            *crc = copy_crc(best, 0, NULL, data, bytes);
            memcpy(tail->buf, data + bytes, (size_t)tail->len);
            there = 1;
        }
        free(data);
        return there;
    }
    uint8_t *mapping = mmap(NULL, all, PROT_READ, MAP_SHARED, fd, 0);
    if (mapping == MAP_FAILED)
        return 0;
    if (resident(fd, mapping, all)) {
        *crc = copy_crc(best, 0, NULL, mapping, bytes);
        memcpy(tail->buf, mapping + bytes, (size_t)tail->len);
        there = 1;
    }
    munmap(mapping, all);
    return there;
}

static PyObject *py_checksum_file(PyObject *self, PyObject *args)
{
    PyObject *path = NULL;
    Py_buffer tail;
    Py_ssize_t bytes;
    int done = 0;
    uint32_t crc = 0;

    if (!PyArg_ParseTuple(args, "O&nw*", PyUnicode_FSConverter, &path, &bytes, &tail)) {
        Py_XDECREF(path);
        return NULL;
    }
    const char *name = PyBytes_AsString(path);
    if (name && bytes >= 0) {
        Py_BEGIN_ALLOW_THREADS
        struct stat about;
        int fd = open(name, O_RDONLY | O_CLOEXEC);
        if (fd >= 0) {
            if (!fstat(fd, &about) && about.st_size == bytes + tail.len)
                done = checksum(fd, (size_t)bytes, &tail, &crc);
            close(fd);
        }
        Py_END_ALLOW_THREADS
    }
    return answer(path, &tail, done, crc);
}

static PyMethodDef methods[] = {
    {"copy_crc32c", py_copy_crc32c, METH_VARARGS,
     "copy_crc32c(source, target, crc=0, kernel=None): copies all bytes; the crc32c carried on."},
    {"read_file", py_read_file, METH_VARARGS,
     "read_file(path, target, tail): fills both from a file of just that size; target may have gaps "
     "between its rows. The crc32c of what went to target; None where the file is not there, has "
     "another size, is large and not in memory, or could not be read."},
    {"checksum_file", py_checksum_file, METH_VARARGS,
     "checksum_file(path, bytes, tail): the crc32c of a file of so many bytes and a tail, which goes "
     "to tail; None as for read_file."},
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
