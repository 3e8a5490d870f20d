/* Copies bytes and takes their crc32c on the way, in one pass over memory.
 *
 * A load that verifies has to read every byte, write it, and run a checksum over it. Done as
 * read(2) and then a checksum, the destination is fetched into the cache only to be overwritten,
 * and is read once more. Here the bytes go to the destination by stores that bypass the cache, and are
 * folded into the checksum while they are in registers. They come from a mapping of the file where its
 * pages lie in memory in large pieces, else by read(2) through a little memory that stays in the cache.
 * Here is what Python calls; the kernels that do it are in _crc_kernels.h, what they copy to and from in
 * _copy_rows.h and _take_files.h.
 *
 * Built where there is a compiler; shardstore/storage/movers/chunk_reader.py does without it where there is none.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdlib.h>

#include "_take_files.h"

/* Up to so many bytes keep the interpreter's lock: where other threads wait for it, to hand it over and
 * to get it back takes longer than the bytes do. */
#define KEEP_UP_TO (64 * 1024)

static PyThreadState *let_go(Py_ssize_t bytes)
{
    return bytes <= KEEP_UP_TO ? NULL : PyEval_SaveThread();
}

static void take_back(PyThreadState *state)
{
    if (state)
        PyEval_RestoreThread(state);
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
        PyThreadState *state = let_go(from.len);
        take(&sink, from.buf, (size_t)from.len);
        take_back(state);
        crc = sink.crc;
    }
    PyBuffer_Release(&from);
    PyBuffer_Release(&to);
    return PyErr_Occurred() ? NULL : PyLong_FromUnsignedLong(crc);
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
            PyThreadState *state = let_go(from.len);
            crc = gather_crc(best, to.buf, &from, (size_t)block, (uint32_t)crc, (size_t)position,
                             noted);
            take_back(state);
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

static uint8_t *new_piece(void)
{
    return aligned_alloc(LINE, PIECE_BYTES);
}

/* A chunk file to be read: its checksum lies behind the chunk, and may be known beforehand. */
struct job {
    PyObject *path;
    Py_buffer to;
    int dense, opened, done;
    long long expected;
};

static void run_job(struct job *job, uint8_t *piece)
{
    uint8_t stored[4];
    const Py_buffer tail = {.buf = stored, .len = sizeof stored};
    struct rows rows = rows_of(&job->to);
    struct sink sink = {best, job->dense ? job->to.buf : NULL, job->dense ? NULL : &rows, 0};
    uint32_t crc;

    if (!take_file(PyBytes_AsString(job->path), &sink, (size_t)job->to.len, &tail, piece))
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
    uint8_t *piece = new_piece();
    if (!jobs || !piece) {
        free(jobs);
        free(piece);
        return PyErr_NoMemory();
    }
    int ready = 1;
    for (Py_ssize_t i = 0; ready && i < count; i++)
        ready = open_job(jobs + i, PyList_GetItem(paths, i), PyList_GetItem(targets, i),
                         PyList_GetItem(expected, i));
    if (ready) {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < count; i++)
            run_job(jobs + i, piece);
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
    free(piece);
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
    uint8_t *piece = new_piece();
    if (!piece)
        PyErr_NoMemory();
    if (name && piece && bytes >= 0) {
        struct sink sink = {best, NULL, NULL, 0};
        Py_BEGIN_ALLOW_THREADS
        done = take_file(name, &sink, (size_t)bytes, &tail, piece);
        Py_END_ALLOW_THREADS
        crc = sink.crc;
    }
    free(piece);
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
