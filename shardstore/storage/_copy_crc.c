/* Copies bytes and takes their crc32c on the way, in one pass over memory.
 *
 * A load that verifies has to read every byte, write it, and run a checksum over it. Done as
 * read(2) and then a checksum, the destination is fetched into the cache only to be overwritten,
 * and is read once more. Here the bytes go to the destination by stores that bypass the cache, and are
 * folded into the checksum while they are in registers. They come from a mapping of the file where its
 * pages lie in memory in large pieces, else by read(2) through a little memory that stays in the cache.
 * The kernels that do it are in _crc_kernels.h.
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
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "_crc_kernels.h"

/* Of a file, below which nobody asks whether it is in memory: reading it costs no more; and below which
 * it is not mapped: a page table has entries for as much. */
enum { MIN_ASKED_BYTES = 128 * 1024, MIN_MAPPED_BYTES = 2 * 1024 * 1024 };
/* What is read at a time, on the stack: a part of the second nearest cache. */
enum { PIECE_BYTES = 64 * 1024 };
/* What is copied, or summed, while it is in the nearest cache. */
enum { SPREAD_BYTES = 16 * 1024, MOST_AXES = 64 };
/* The system call's number on x86-64: headers may be older than the kernel. */
enum { CACHESTAT = 451 };

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

/* The rows of a buffer whose last axis is contiguous, in C order. */
struct rows {
    /* What is left of this row; the first field, so that a pointer to it is one to the rows. */
    struct lines rest;
    const Py_buffer *of;
    uint8_t *start;
    /* Bytes of a row: of the last axis, and of those before it that lie without gaps. */
    size_t run;
    int axes;
    /* Whether each row is of whole lines, at a multiple of LINE. */
    int in_lines;
    Py_ssize_t index[MOST_AXES];
};

static void next_row(struct rows *rows)
{
    for (int axis = rows->axes; axis--;) {
        rows->start += rows->of->strides[axis];
        if (++rows->index[axis] < rows->of->shape[axis])
            break;
        rows->start -= rows->of->strides[axis] * rows->of->shape[axis];
        rows->index[axis] = 0;
    }
}

static void turn(struct lines *rest)
{
    struct rows *rows = (struct rows *)rest;

    next_row(rows);
    rest->at = rows->start;
    rest->left = rows->run;
}

static struct rows rows_of(const Py_buffer *of)
{
    struct rows rows = {.of = of, .start = of->buf, .run = 1};

    if (of->ndim) {
        rows.axes = of->ndim - 1;
        rows.run = (size_t)of->shape[rows.axes];
    }
    while (rows.axes && of->strides[rows.axes - 1] == (Py_ssize_t)rows.run)
        rows.run *= (size_t)of->shape[--rows.axes];
    rows.rest = (struct lines){rows.start, rows.run, turn};
    uintptr_t all = (uintptr_t)rows.start | rows.run;
    for (int axis = 0; axis < rows.axes; axis++)
        all |= (uintptr_t)of->strides[axis];
    rows.in_lines = all % LINE == 0;
    return rows;
}

/* Has the cache fetch the row after this one. Where there is none, nothing happens. */
static void expect_row(const struct rows *rows)
{
    const size_t most = rows->run < SPREAD_BYTES ? rows->run : SPREAD_BYTES;

    if (rows->axes)
        for (size_t at = 0; at < most; at += LINE)
            _mm_prefetch((const char *)rows->start + rows->of->strides[rows->axes - 1] + at, _MM_HINT_T2);
}

/* Carries the checksum over a buffer, in C order, and notes it wherever a block ends.
 *
 * What has gaps between its rows goes to `to` on the way, and each piece of it is summed while it is
 * in the cache; `to` is NULL for what has none. `position` is that of the buffer's start in what the
 * blocks divide. */
static uint32_t gather_crc(const struct kernel *kernel, uint8_t *to, const Py_buffer *from, size_t block,
                           uint32_t crc, size_t position, uint32_t *noted)
{
    struct rows rows = rows_of(from);
    const uint8_t *source = to ? to : from->buf;
    const size_t bytes = (size_t)from->len;
    size_t copied = to ? 0 : bytes;

    for (size_t summed = 0; summed < bytes;) {
        size_t piece = block - (position + summed) % block;
        if (to && piece > SPREAD_BYTES)
            piece = SPREAD_BYTES;
        if (piece > bytes - summed)
            piece = bytes - summed;
        for (; copied < summed + piece; copied += rows.run) {
            expect_row(&rows);
            memcpy(to + copied, rows.start, rows.run);
            next_row(&rows);
        }
        crc = copy_crc(kernel, crc, NULL, source + summed, piece);
        summed += piece;
        if ((position + summed) % block == 0)
            *noted++ = crc;
    }
    return crc;
}

/* Spreads bytes over what is left of the rows of a buffer. */
static void spread(struct rows *rows, const uint8_t *from, size_t bytes)
{
    while (bytes) {
        if (!rows->rest.left)
            turn(&rows->rest);
        size_t run = rows->rest.left < bytes ? rows->rest.left : bytes;
        copy_run(rows->rest.at, from, run);
        rows->rest.at += run, rows->rest.left -= run;
        from += run, bytes -= run;
    }
}

/* The same, and carries the checksum over them. */
static uint32_t spread_crc(const struct kernel *kernel, uint32_t crc, struct rows *rows,
                           const uint8_t *from, size_t bytes)
{
    const size_t whole = rows->in_lines ? bytes - bytes % kernel->block : 0;

    if (whole) {
        crc = ~kernel->run(kernel->by, ~crc, NULL, &rows->rest, from, whole);
        from += whole, bytes -= whole;
    }
    while (bytes) {
        /* As much as stays in the cache between the one and the other. */
        const size_t size = bytes < SPREAD_BYTES ? bytes : SPREAD_BYTES;
        crc = copy_crc(kernel, crc, NULL, from, size);
        spread(rows, from, size);
        from += size, bytes -= size;
    }
    _mm_sfence();
    return crc;
}

/* Where bytes go, if anywhere, and their checksum so far. */
struct sink {
    const struct kernel *kernel;
    uint8_t *to;
    struct rows *rows;
    uint32_t crc;
};

static void take(struct sink *sink, const uint8_t *from, size_t bytes)
{
    if (sink->rows) {
        sink->crc = spread_crc(sink->kernel, sink->crc, sink->rows, from, bytes);
        return;
    }
    sink->crc = copy_crc(sink->kernel, sink->crc, sink->to, from, bytes);
    if (sink->to)
        sink->to += bytes;
}

/* A destination of bytes that lie one behind the other along the last axis; 0 with an exception set. */
static int open_target(PyObject *target, Py_buffer *to, int *dense)
{
    if (PyObject_GetBuffer(target, to, PyBUF_STRIDED | PyBUF_WRITABLE))
        return 0;
    *dense = PyBuffer_IsContiguous(to, 'C');
    if (to->itemsize == 1 && (*dense || (to->ndim <= MOST_AXES && to->strides[to->ndim - 1] == 1)))
        return 1;
    PyBuffer_Release(to);
    PyErr_SetString(PyExc_ValueError, "the target has to be of bytes, along its last axis one behind the "
                                      "other");
    return 0;
}

static PyObject *py_copy_crc32c(PyObject *self, PyObject *args)
{
    PyObject *target;
    Py_buffer from, to;
    unsigned long crc = 0;
    const char *name = NULL;
    const struct kernel *kernel = best;
    int dense;

    if (!PyArg_ParseTuple(args, "y*O|kz", &from, &target, &crc, &name))
        return NULL;
    if (!open_target(target, &to, &dense)) {
        PyBuffer_Release(&from);
        return NULL;
    }
    for (int i = 0; name && i < KERNELS; i++)
        if (!strcmp(name, kernels[i].name) && supported(i))
            kernel = &kernels[i], name = NULL;
    if (name)
        PyErr_Format(PyExc_ValueError, "no kernel %s on this processor", name);
    else if (from.len != to.len)
        PyErr_Format(PyExc_ValueError, "%zd bytes do not go into %zd", from.len, to.len);
    if (!PyErr_Occurred()) {
        struct rows rows = rows_of(&to);
        struct sink sink = {kernel, dense ? to.buf : NULL, dense ? NULL : &rows, (uint32_t)crc};
        Py_BEGIN_ALLOW_THREADS
        take(&sink, from.buf, (size_t)from.len);
        Py_END_ALLOW_THREADS
        crc = sink.crc;
    }
    PyBuffer_Release(&from);
    PyBuffer_Release(&to);
    return PyErr_Occurred() ? NULL : PyLong_FromUnsignedLong(crc);
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

/* Halves of a file's start. */
enum share { HALF = 1, ALL = 2 };

/* Whether such a share of a file's start is in memory; 0 where the kernel does not say. */
static int is_cached(int fd, size_t bytes, enum share halves)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), pages = (bytes + page - 1) / page;
    const long long cached = pages_cached(fd, bytes);

    return cached >= 0 && (size_t)cached * 2 >= pages * (size_t)halves;
}

/* Whether the pages of a mapping come many at a time: in memory they lie in large pieces, as after
 * large writes. Where each few cost a fault of their own, read(2) is faster. */
static int comes_at_once(const uint8_t *mapping)
{
    struct rusage before, after;

    if (getrusage(RUSAGE_THREAD, &before))
        return 0;
    for (size_t at = 0; at < MIN_MAPPED_BYTES; at += MIN_MAPPED_BYTES / 8)
        (void)*(const volatile uint8_t *)(mapping + at);
    return !getrusage(RUSAGE_THREAD, &after) && after.ru_minflt - before.ru_minflt <= 2;
}

/* The checksum and those at the ends of blocks, as Python has them. */
static PyObject *noted_answer(uint32_t crc, const uint32_t *noted, size_t count)
{
    PyObject *list = PyList_New((Py_ssize_t)count), *last = PyLong_FromUnsignedLong(crc), *both = NULL;

    for (size_t i = 0; list && i < count; i++) {
        PyObject *value = PyLong_FromUnsignedLong(noted[i]);
        if (!value || PyList_SetItem(list, (Py_ssize_t)i, value))
            Py_CLEAR(list);
    }
    if (list && last)
        both = PyTuple_Pack(2, last, list);
    Py_XDECREF(list);
    Py_XDECREF(last);
    return both;
}

static PyObject *py_sum_blocks(PyObject *self, PyObject *args)
{
    PyObject *source, *target, *found = NULL;
    Py_buffer from, to = {0};
    Py_ssize_t block, position;
    unsigned long crc;

    if (!PyArg_ParseTuple(args, "OOnkn", &source, &target, &block, &crc, &position))
        return NULL;
    if (block < 1 || position < 0)
        return PyErr_Format(PyExc_ValueError, "blocks of %zd bytes, from %zd on", block, position);
    if (PyObject_GetBuffer(source, &from, PyBUF_STRIDED_RO))
        return NULL;
    const int dense = PyBuffer_IsContiguous(&from, 'C');
    if (target != Py_None && PyObject_GetBuffer(target, &to, PyBUF_SIMPLE | PyBUF_WRITABLE)) {
        PyBuffer_Release(&from);
        return NULL;
    }
    if (from.itemsize != 1 || from.ndim > MOST_AXES || (!dense && from.strides[from.ndim - 1] != 1))
        PyErr_SetString(PyExc_ValueError, "the source has to be of bytes, along its last axis one "
                                          "behind the other");
    else if (target == Py_None ? !dense : to.len != from.len)
        PyErr_Format(PyExc_ValueError, "%zd bytes do not go into %zd", from.len, to.len);
    if (!PyErr_Occurred()) {
        const size_t count = (size_t)((position + from.len) / block - position / block);
        uint32_t *noted = malloc((count ? count : 1) * sizeof *noted);
        if (noted) {
            Py_BEGIN_ALLOW_THREADS
            crc = gather_crc(best, to.buf, &from, (size_t)block, (uint32_t)crc, (size_t)position,
                             noted);
            Py_END_ALLOW_THREADS
            found = noted_answer((uint32_t)crc, noted, count);
            free(noted);
        } else {
            PyErr_NoMemory();
        }
    }
    PyBuffer_Release(&from);
    if (target != Py_None)
        PyBuffer_Release(&to);
    return found;
}

/* Takes a file of so many bytes, and a tail, from a mapping; 0 where that is not the way. To ask of all
 * of a file what is in memory takes long where that lies in small pieces: its start is asked first. */
static int take_mapped(int fd, struct sink *sink, size_t bytes, const Py_buffer *tail)
{
    const size_t all = bytes + (size_t)tail->len;

    if (all < MIN_MAPPED_BYTES || !is_cached(fd, MIN_MAPPED_BYTES, ALL) || !on_this_machine(fd))
        return 0;
    uint8_t *mapping = mmap(NULL, all, PROT_READ, MAP_SHARED, fd, 0);
    if (mapping == MAP_FAILED)
        return 0;
    const int taken = comes_at_once(mapping) && is_cached(fd, all, ALL);
    if (taken) {
        take(sink, mapping, bytes);
        memcpy(tail->buf, mapping + bytes, (size_t)tail->len);
    }
    munmap(mapping, all);
    return taken;
}

/* The same by read(2); 0 where one came up short, or the file is large and most of it not in memory. */
static int take_in_pieces(int fd, struct sink *sink, size_t bytes, const Py_buffer *tail)
{
    _Alignas(LINE) uint8_t piece[PIECE_BYTES];
    const size_t all = bytes + (size_t)tail->len;
    int flags = all < MIN_ASKED_BYTES ? 0 : RWF_NOWAIT;
    size_t at = 0;

    do {
        const size_t size = bytes - at < sizeof piece ? bytes - at : sizeof piece;
        const size_t behind = at + size == bytes ? (size_t)tail->len : 0;
        const struct iovec parts[] = {{piece, size}, {tail->buf, behind}};
        ssize_t got = preadv2(fd, parts, 2, (off_t)at, flags);
        if (flags && got != (ssize_t)(size + behind)) {
            /* Not all is there, or the file system can not say: from here on it is waited for. */
            if (!is_cached(fd, all, HALF))
                return 0;
            flags = 0;
            got = preadv2(fd, parts, 2, (off_t)at, flags);
        }
        if (got != (ssize_t)(size + behind))
            return 0;
        take(sink, piece, size);
        at += size;
    } while (at < bytes);
    return 1;
}

/* Takes a file, if there is one of just that many bytes. */
static int take_file(const char *name, struct sink *sink, size_t bytes, const Py_buffer *tail)
{
    struct stat about;
    int taken = 0, fd = open(name, O_RDONLY | O_CLOEXEC);

    if (fd < 0)
        return 0;
    if (!fstat(fd, &about) && (size_t)about.st_size == bytes + (size_t)tail->len)
        taken = take_mapped(fd, sink, bytes, tail) || take_in_pieces(fd, sink, bytes, tail);
    close(fd);
    return taken;
}

/* A chunk file to be read: its checksum lies behind the chunk, and may be known beforehand. */
struct job {
    PyObject *path;
    Py_buffer to;
    int dense, opened, done;
    long long expected;
};

static void run_job(struct job *job)
{
    uint8_t stored[4];
    const Py_buffer tail = {.buf = stored, .len = sizeof stored};
    struct rows rows = rows_of(&job->to);
    struct sink sink = {best, job->dense ? job->to.buf : NULL, job->dense ? NULL : &rows, 0};
    uint32_t crc;

    if (!take_file(PyBytes_AsString(job->path), &sink, (size_t)job->to.len, &tail))
        return;
    memcpy(&crc, stored, sizeof crc); /* little-endian, as this processor is */
    job->done = crc == sink.crc && (job->expected < 0 || job->expected == (long long)crc);
}

static int open_job(struct job *job, PyObject *path, PyObject *target, PyObject *expected)
{
    job->expected = -1;
    if (expected != Py_None && (job->expected = PyLong_AsLongLong(expected)) == -1 && PyErr_Occurred())
        return 0;
    if (!PyUnicode_FSConverter(path, &job->path))
        return 0;
    return job->opened = open_target(target, &job->to, &job->dense);
}

static PyObject *py_read_chunks(PyObject *self, PyObject *args)
{
    PyObject *paths, *targets, *expected, *left = NULL;

    if (!PyArg_ParseTuple(args, "O!O!O!", &PyList_Type, &paths, &PyList_Type, &targets, &PyList_Type,
                          &expected))
        return NULL;
    const Py_ssize_t count = PyList_Size(paths);
    if (PyList_Size(targets) != count || PyList_Size(expected) != count)
        return PyErr_Format(PyExc_ValueError, "%zd paths, %zd targets, %zd checksums", count,
                            PyList_Size(targets), PyList_Size(expected));
    struct job *jobs = calloc(count ? (size_t)count : 1, sizeof *jobs);
    if (!jobs)
        return PyErr_NoMemory();
    int ready = 1;
    for (Py_ssize_t i = 0; ready && i < count; i++)
        ready = open_job(jobs + i, PyList_GetItem(paths, i), PyList_GetItem(targets, i),
                         PyList_GetItem(expected, i));
    if (ready) {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < count; i++)
            run_job(jobs + i);
        Py_END_ALLOW_THREADS
        left = PyList_New(0);
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (left && !jobs[i].done) {
            PyObject *position = PyLong_FromSsize_t(i);
            if (!position || PyList_Append(left, position))
                Py_CLEAR(left);
            Py_XDECREF(position);
        }
        if (jobs[i].opened)
            PyBuffer_Release(&jobs[i].to);
        Py_XDECREF(jobs[i].path);
    }
    free(jobs);
    return left;
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
        struct sink sink = {best, NULL, NULL, 0};
        Py_BEGIN_ALLOW_THREADS
        done = take_file(name, &sink, (size_t)bytes, &tail);
        Py_END_ALLOW_THREADS
        crc = sink.crc;
    }
    PyBuffer_Release(&tail);
    Py_DECREF(path);
    if (PyErr_Occurred())
        return NULL;
    if (!done)
        Py_RETURN_NONE;
    return PyLong_FromUnsignedLong(crc);
}

static PyMethodDef methods[] = {
    {"copy_crc32c", py_copy_crc32c, METH_VARARGS,
     "copy_crc32c(source, target, crc=0, kernel=None): copies all bytes; the crc32c carried on. The "
     "target may have gaps between its rows."},
    {"sum_blocks", py_sum_blocks, METH_VARARGS,
     "sum_blocks(source, target, block, crc, position): the crc32c carried on over the source, and "
     "its values where blocks end; on the way the source, which may have gaps between its rows, is "
     "copied to target, if that is not None."},
    {"read_chunks", py_read_chunks, METH_VARARGS,
     "read_chunks(paths, targets, checksums): fills each target, which may have gaps between its rows, "
     "from a file of its bytes and their crc32c, which has to be the one given, if one is. The positions "
     "of those for which that did not go: the file is not there, has another size, is large and not in "
     "memory, could not be read, or holds something else; such a target may have been written to."},
    {"checksum_file", py_checksum_file, METH_VARARGS,
     "checksum_file(path, bytes, tail): the crc32c of a file of so many bytes and a tail, which goes "
     "to tail; None where the file is not there, has another size, is large and not in memory, or could "
     "not be read."},
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
