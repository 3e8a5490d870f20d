/* Reads chunk files: copies the bytes and computes their crc32c in one pass over memory.
 *
 * read(2) followed by a checksum fetches the destination into the cache only to overwrite it, and then reads it
 * again. This module folds the bytes into the checksum in registers and writes them to the destination with
 * stores that bypass the cache. It reads from a mapping of the file if the page cache holds the file in large
 * pieces; otherwise it calls read(2) with a small buffer that stays in the cache.
 *
 * The checksum is folded as in V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using
 * PCLMULQDQ Instruction" (Intel, 2009), for the reflected Castagnoli polynomial. Folding reduces the data to a
 * short message with the same checksum. The crc32 instruction computes the checksum of that message.
 *
 * Other processors (ARM, and x86-64 without VPCLMULQDQ) read small files here, which saves calls of Python, and
 * no others: without folding, a large file takes longer than a read into its destination and google-crc32c.
 *
 * For Linux. The package works without it: files.py imports it if it was built.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>

#if defined(__x86_64__) && !defined(SHARDSTORE_PORTABLE)
#include <immintrin.h>
#define ON_X86 1
#else
#define ON_X86 0
#endif

#define WITH_CRC __attribute__((target("sse4.2")))
#define WITH_WIDE __attribute__((target("avx512f,avx512vl,avx512bw,vpclmulqdq,pclmul,sse4.2")))
#define WITH_HALF __attribute__((target("avx2,vpclmulqdq,pclmul,sse4.2")))
#define INLINE static inline __attribute__((always_inline))

enum {
    CRC_BYTES = 4,
    LINE = 64,
    BLOCK = 4 * LINE, /* bytes folded at a time */
    AHEAD = 2048,     /* distance of prefetches */
    PIECE_BYTES = 256 * 1024, /* size of a read: fits into the second-level cache */
    MAPPED_FROM = 2 * 1024 * 1024, /* smallest file that is mapped: the size of a huge page */
    PROBED_FROM = 128 * 1024, /* smaller files are read whether or not they are in the page cache */
    STEP_BYTES = 16 * 1024,   /* checksummed, then copied to rows: fits into the first-level cache */
};

/* crc32c of each byte that 0 to 7 bytes follow, without the inversions (M. E. Kounavis and F. L. Berry, "A
 * Systematic Approach to Building High Performance Software-based CRC Generators", 2005). */
static uint32_t tables[8][256];

static void make_tables(void)
{
    for (uint32_t n = 0; n < 256; n++) {
        uint32_t value = n;
        for (int bit = 0; bit < 8; bit++)
            value = (value >> 1) ^ (value & 1 ? 0x82F63B78u : 0);
        tables[0][n] = value;
    }
    for (uint32_t n = 0; n < 256; n++)
        for (int i = 1; i < 8; i++)
            tables[i][n] = (tables[i - 1][n] >> 8) ^ tables[0][tables[i - 1][n] & 0xFF];
}

/* Continues the crc32c register over bytes, without the initial and final inversion, on any processor. */
static uint32_t carry_tables(uint32_t crc, const uint8_t *from, size_t bytes)
{
    for (; bytes >= 8; from += 8, bytes -= 8) {
        const uint32_t first = crc ^ (from[0] | (uint32_t)from[1] << 8 | (uint32_t)from[2] << 16 |
                                      (uint32_t)from[3] << 24);
        crc = tables[7][first & 0xFF] ^ tables[6][first >> 8 & 0xFF] ^ tables[5][first >> 16 & 0xFF] ^
              tables[4][first >> 24] ^ tables[3][from[4]] ^ tables[2][from[5]] ^ tables[1][from[6]] ^
              tables[0][from[7]];
    }
    for (; bytes; bytes--)
        crc = (crc >> 8) ^ tables[0][(crc ^ *from++) & 0xFF];
    return crc;
}

/* The one for this processor. */
static uint32_t (*carry)(uint32_t, const uint8_t *, size_t) = carry_tables;

#if ON_X86
/* Factors that move the lower and the upper half of 128 bits forward by one block. */
static uint64_t by_low, by_high;

/* x to the power n modulo the Castagnoli polynomial, bits reflected. */
static uint64_t power_of_x(unsigned n)
{
    uint32_t value = 0x80000000u;
    while (n--)
        value = (value >> 1) ^ (value & 1 ? 0x82F63B78u : 0);
    return value;
}

/* The same with the crc32 instruction. */
WITH_CRC static uint32_t carry_words(uint32_t crc, const uint8_t *from, size_t bytes)
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

/* Folds whole blocks, at least one. Copies them to `to`, which is aligned to LINE, unless it is NULL. */
WITH_WIDE INLINE uint32_t fold_blocks(uint32_t crc, uint8_t *to, const uint8_t *from, size_t bytes)
{
    enum { LANES = BLOCK / LINE };
    const __m512i factor = _mm512_broadcast_i32x4(_mm_set_epi64x((long long)by_high, (long long)by_low));
    __m512i state[LANES];
    uint8_t rest[BLOCK];

#pragma GCC unroll 4
    for (int i = 0; i < LANES; i++) {
        state[i] = _mm512_loadu_si512(from + 64 * i);
        if (to)
            _mm512_stream_si512((__m512i *)(to + 64 * i), state[i]);
    }
    state[0] = _mm512_xor_si512(state[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)crc)));
    for (size_t at = BLOCK; at < bytes; at += BLOCK) {
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
    return carry(0, rest, BLOCK);
}

/* The same with registers of half the width, for processors without AVX-512. */
WITH_HALF INLINE uint32_t fold_halves(uint32_t crc, uint8_t *to, const uint8_t *from, size_t bytes)
{
    enum { WIDTH = LINE / 2, LANES = BLOCK / WIDTH };
    const __m256i factor = _mm256_broadcastsi128_si256(_mm_set_epi64x((long long)by_high, (long long)by_low));
    __m256i state[LANES];
    uint8_t rest[BLOCK];

#pragma GCC unroll 8
    for (int i = 0; i < LANES; i++)
        state[i] = _mm256_setzero_si256();
    state[0] = _mm256_zextsi128_si256(_mm_cvtsi32_si128((int)crc));
    for (size_t at = 0; at < bytes; at += BLOCK) {
#pragma GCC unroll 8
        for (int i = 0; i < LANES; i++) {
            const uint8_t *source = from + at + WIDTH * i;
            if (i % 2 == 0)
                _mm_prefetch((const char *)source + AHEAD, _MM_HINT_T0);
            const __m256i next = _mm256_loadu_si256((const __m256i *)source);
            if (to)
                _mm256_stream_si256((__m256i *)(to + at + WIDTH * i), next);
            const __m256i moved = _mm256_xor_si256(_mm256_clmulepi64_epi128(state[i], factor, 0x00),
                                                   _mm256_clmulepi64_epi128(state[i], factor, 0x11));
            state[i] = _mm256_xor_si256(at ? moved : state[i], next);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < LANES; i++)
        _mm256_storeu_si256((__m256i *)(rest + WIDTH * i), state[i]);
    return carry(0, rest, BLOCK);
}

/* These have the compiler build two versions each: with the copy, and without it. */
WITH_WIDE static uint32_t fold_wide(uint32_t crc, uint8_t *to, const uint8_t *from, size_t bytes)
{
    return to ? fold_blocks(crc, to, from, bytes) : fold_blocks(crc, NULL, from, bytes);
}

WITH_HALF static uint32_t fold_half(uint32_t crc, uint8_t *to, const uint8_t *from, size_t bytes)
{
    return to ? fold_halves(crc, to, from, bytes) : fold_halves(crc, NULL, from, bytes);
}

#endif

/* Copies bytes unless `to` is NULL, and continues the register over them. */
static uint32_t fold_serial(uint32_t crc, uint8_t *to, const uint8_t *from, size_t bytes)
{
    if (to)
        memcpy(to, from, bytes);
    return carry(crc, from, bytes);
}

/* The one for this processor, and the largest chunks that it reads. */
static uint32_t (*fold)(uint32_t, uint8_t *, const uint8_t *, size_t) = fold_serial;
static Py_ssize_t most_bytes = PROBED_FROM;

/* Continues the checksum over bytes and copies them to `to` (any alignment) unless it is NULL. */
static uint32_t copy_crc(uint32_t crc, uint8_t *to, const uint8_t *from, size_t bytes)
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
    const size_t whole = bytes - bytes % BLOCK;
    if (whole)
        crc = fold(crc, to, from, whole);
    if (to)
        memcpy(to + whole, from + whole, bytes - whole);
    return ~carry(crc, from + whole, bytes - whole);
}

/* Destination of the next bytes: NULL, contiguous memory (`run` is 0), or rows of `run` bytes. */
struct target {
    uint8_t *at;
    size_t left, run; /* bytes left in this row; bytes of a row */
    Py_ssize_t gap;   /* from the end of a row to the start of the next row */
};

/* Describes a buffer. Returns 0 if its elements are neither contiguous nor in evenly spaced rows. */
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

/* Copies a part of a row; bypasses the cache if the part consists of whole cache lines. */
static void copy_run(uint8_t *to, const uint8_t *from, size_t bytes)
{
#if ON_X86
    if (((uintptr_t)to | bytes) % LINE == 0) {
        for (size_t at = 0; at < bytes; at += 16)
            _mm_stream_si128((__m128i *)(to + at), _mm_loadu_si128((const __m128i *)(from + at)));
        return;
    }
#endif
    memcpy(to, from, bytes);
}

/* Copies the next bytes to their destination and continues the checksum over them. */
static uint32_t take(uint32_t crc, struct target *to, const uint8_t *from, size_t bytes)
{
    if (!to->run) {
        crc = copy_crc(crc, to->at, from, bytes);
        to->at += to->at ? bytes : 0;
        return crc;
    }
    while (bytes) {
        size_t step = bytes < STEP_BYTES ? bytes : STEP_BYTES;
        crc = copy_crc(crc, NULL, from, step);
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

/* Returns whether a file may be mapped: whether its file system is local to this machine (magic numbers of
 * statfs(2)). If another machine deletes a mapped file, the next access kills the process; read(2) would
 * return an error. */
static int is_here(int fd)
{
    enum { EXT = 0xEF53, XFS = 0x58465342, ZFS = 0x2FC12FC1, TMPFS = 0x01021994, OVERLAY = 0x794C7630 };
    enum { F2FS = 0xF2F52010, BTRFS = 0x9123683E };
    struct statfs about;
    const uint32_t type = fstatfs(fd, &about) ? 0 : (uint32_t)about.f_type;

    return type == EXT || type == XFS || type == (uint32_t)F2FS || type == ZFS || type == TMPFS ||
           type == (uint32_t)BTRFS || type == OVERLAY;
}

/* Returns whether the first `bytes` bytes of a file are in the page cache, by cachestat(2) of Linux 6.5; 0
 * on older kernels. */
static int is_cached(int fd, size_t bytes)
{
    enum { CACHESTAT = 451 }; /* headers may be older than the kernel */
    const uint64_t range[2] = {0, bytes};
    uint64_t found[5] = {0}; /* the first entry is the number of cached pages */

    return !syscall(CACHESTAT, fd, range, found, 0) && found[0] * (uint64_t)sysconf(_SC_PAGESIZE) >= bytes;
}

/* A file to read, and what was read. */
struct request {
    PyObject *path;
    Py_buffer view;
    struct target to;
    Py_ssize_t bytes;
    uint32_t crc, stored;
    int fits, done; /* fits: its target can be filled here */
};

/* Reads a large file through a mapping. Returns 0 if a page fault maps only a few pages, because read(2) is
 * then faster. A fault maps many pages if the page cache holds the file in large pieces. */
static int take_mapped(int fd, struct request *of, size_t bytes)
{
    struct rusage before, after;
    int taken = 0;

    if (bytes < MAPPED_FROM || !is_cached(fd, MAPPED_FROM) || !is_here(fd) ||
        getrusage(RUSAGE_THREAD, &before))
        return 0;
    const uint8_t *mapping = mmap(NULL, bytes + CRC_BYTES, PROT_READ, MAP_SHARED, fd, 0);
    if (mapping == MAP_FAILED)
        return 0;
    for (size_t at = 0; at < MAPPED_FROM; at += MAPPED_FROM / 8)
        (void)*(const volatile uint8_t *)(mapping + at);
    if (!getrusage(RUSAGE_THREAD, &after) && after.ru_minflt - before.ru_minflt <= 2 &&
        is_cached(fd, bytes + CRC_BYTES)) {
        of->crc = take(of->crc, &of->to, mapping, bytes);
        memcpy(&of->stored, mapping + bytes, CRC_BYTES);
        taken = 1;
    }
    munmap((void *)mapping, bytes + CRC_BYTES);
    return taken;
}

/* Reads a file of `bytes` bytes and a checksum. Returns 0 if there is no file of exactly this size, or if the
 * file is large and its start is not in the page cache: plain reads into the destination are then faster. */
static int read_file(struct request *of)
{
    _Alignas(LINE) uint8_t piece[PIECE_BYTES];
    const size_t bytes = (size_t)of->bytes;
    struct stat about;
    /* O_NONBLOCK: if the name is a FIFO, do not wait for a writer. */
    int done = 0, fd = open(PyBytes_AsString(of->path), O_RDONLY | O_CLOEXEC | O_NONBLOCK);

    if (fd < 0)
        return 0;
    if (!fstat(fd, &about) && S_ISREG(about.st_mode) && (size_t)about.st_size == bytes + CRC_BYTES) {
        done = take_mapped(fd, of, bytes);
        for (size_t at = 0; !done;) {
            const size_t size = bytes - at < PIECE_BYTES ? bytes - at : PIECE_BYTES;
            const size_t tail = at + size == bytes ? CRC_BYTES : 0;
            const struct iovec parts[] = {{piece, size}, {&of->stored, tail}};
            int flags = at || bytes < PROBED_FROM ? 0 : RWF_NOWAIT;
            ssize_t got = preadv2(fd, parts, 2, (off_t)at, flags);
            if (got < 0 && errno == EOPNOTSUPP) /* the file system does not support RWF_NOWAIT */
                got = preadv2(fd, parts, 2, (off_t)at, 0);
            if (got != (ssize_t)(size + tail))
                break;
            of->crc = take(of->crc, &of->to, piece, size);
            at += size;
            done = tail != 0;
        }
    }
#if ON_X86
    _mm_sfence(); /* after the stores that bypass the cache */
#endif
    close(fd);
    return done;
}

/* Takes a request apart: path, size, and target or None. Returns 0 with an exception. */
static int prepare(struct request *one, PyObject *item)
{
    PyObject *target;

    if (!PyArg_ParseTuple(item, "O&nO", PyUnicode_FSConverter, &one->path, &one->bytes, &target) ||
        (target != Py_None && PyObject_GetBuffer(target, &one->view, PyBUF_STRIDED | PyBUF_WRITABLE)))
        return 0;
    one->fits = one->bytes >= 0 && one->bytes <= most_bytes && (target == Py_None || describe(&one->view, &one->to));
    if (target == Py_None || one->view.len == one->bytes)
        return 1;
    PyErr_Format(PyExc_ValueError, "%zd bytes do not go into %zd", one->bytes, one->view.len);
    return 0;
}

static PyObject *read_chunk_files(PyObject *self, PyObject *list)
{
    PyObject *found = NULL, *items = PySequence_Tuple(list); /* keeps them, whatever their parsing calls */
    const Py_ssize_t size = items ? PyTuple_Size(items) : 0;
    struct request *all = PyMem_Calloc((size_t)size, sizeof(*all)), *one = all;
    const Py_ssize_t count = all ? size : 0;

    while (one < all + count && prepare(one, PyTuple_GetItem(items, one - all)))
        one++;
    if (items && all && one == all + count) {
        Py_BEGIN_ALLOW_THREADS
        for (one = all; one < all + count; one++)
            one->done = one->fits && read_file(one);
        Py_END_ALLOW_THREADS
        found = PyList_New(count);
    }
    for (one = all; one < all + count; one++) {
        if (found)
            PyList_SetItem(found, one - all,
                           one->done ? Py_BuildValue("II", one->crc, one->stored) : Py_NewRef(Py_None));
        PyBuffer_Release(&one->view); /* does nothing without a target */
        Py_XDECREF(one->path);
    }
    PyMem_Free(all);
    Py_XDECREF(items);
    return all || !items ? found : PyErr_NoMemory();
}

static PyMethodDef methods[] = {{"read_chunk_files", read_chunk_files, METH_O, "See the stub."}, {NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_copy_crc", NULL, -1, methods};

PyMODINIT_FUNC PyInit__copy_crc(void)
{
    make_tables();
#if ON_X86
    if (__builtin_cpu_supports("sse4.2")) {
        carry = carry_words;
        most_bytes = 4 * PROBED_FROM;
    }
    if (__builtin_cpu_supports("pclmul") && __builtin_cpu_supports("avx2") &&
        __builtin_cpu_supports("vpclmulqdq")) {
        const int has_wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                             __builtin_cpu_supports("avx512bw");
        fold = has_wide ? fold_wide : fold_half;
        most_bytes = PY_SSIZE_T_MAX;
        by_low = power_of_x(BLOCK * 8 + 31);
        by_high = power_of_x(BLOCK * 8 - 33);
    }
#endif
    PyObject *made = PyModule_Create(&module);
    if (made && PyModule_AddIntConstant(made, "MOST_BYTES", most_bytes))
        Py_CLEAR(made);
    return made;
}
