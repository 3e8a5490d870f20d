/* Reads all files of many small arrays and says which arrays are as they were saved.
 *
 * Of files of a few KiB a verification reads tens of thousands, and what each costs in an
 * interpreter is more than what the system calls cost. Here a whole batch is one call, without the
 * interpreter's lock, so that threads are of use. It answers yes or no: what is wrong with an array,
 * shardstore/inspection/verify.py finds out by itself.
 *
 * Built where there is a compiler; shardstore/inspection/small_arrays.py does without it where there is
 * none.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#if !defined(__x86_64__) || !defined(__linux__)
#error "only for Linux on x86-64; the package works without this module"
#endif

#include <nmmintrin.h>

enum { CRC_BYTES = 4, LISTING_BYTES = 4096 };

/* An array, as strings and bytes of objects that the caller holds. */
struct array {
    const char *folder, *document;
    const uint8_t *text, *crcs;
    Py_ssize_t text_bytes, chunks, stored;
    PyObject *names;
};

/* A directory entry, as getdents64(2) has it. */
struct entry {
    uint64_t inode;
    int64_t offset;
    unsigned short length;
    unsigned char type;
    char name[];
};

__attribute__((target("sse4.2"))) static uint32_t crc32c(const uint8_t *from, size_t bytes)
{
    uint64_t value = 0xFFFFFFFFu;

    for (; bytes >= 8; from += 8, bytes -= 8) {
        uint64_t word;
        memcpy(&word, from, 8);
        value = _mm_crc32_u64(value, word);
    }
    for (; bytes; from++, bytes--)
        value = _mm_crc32_u8((uint32_t)value, *from);
    return ~(uint32_t)value;
}

/* How many names a folder has, its own two aside; -1 where it can not be listed. */
static Py_ssize_t names_in(int folder)
{
    _Alignas(struct entry) char listing[LISTING_BYTES];
    Py_ssize_t count = 0;
    long got;

    while ((got = syscall(SYS_getdents64, folder, listing, sizeof listing)) > 0)
        for (long at = 0; at < got;) {
            const struct entry *entry = (const struct entry *)(listing + at);
            count += strcmp(entry->name, ".") && strcmp(entry->name, "..");
            at += entry->length;
        }
    return got < 0 ? -1 : count;
}

/* Whether a file has just so many bytes, which go to `to`; there is room for one more. */
static int reads(int folder, const char *name, uint8_t *to, Py_ssize_t bytes)
{
    int fd = openat(folder, name, O_RDONLY | O_CLOEXEC);
    Py_ssize_t got;

    if (fd < 0)
        return 0;
    got = read(fd, to, (size_t)bytes + 1);
    close(fd);
    return got == bytes;
}

static int chunk_is_sound(const struct array *array, const uint8_t *chunk, const uint8_t *saved)
{
    const Py_ssize_t bytes = array->stored - CRC_BYTES;
    const uint32_t found = crc32c(chunk, (size_t)bytes);

    return !memcmp(&found, chunk + bytes, CRC_BYTES) && !memcmp(&found, saved, CRC_BYTES);
}

/* Whether document, chunks and the names in the folder are all as they should be. */
static int is_sound(const struct array *array, const char *const *names, uint8_t *buffer)
{
    int folder = open(array->folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC), sound;

    if (folder < 0)
        return 0;
    /* Each of the files is opened: with no other name beside them, all are theirs. */
    sound = names_in(folder) == array->chunks + (array->text_bytes > 0) &&
            (!array->text_bytes ||
             (reads(folder, array->document, buffer, array->text_bytes) &&
              !memcmp(buffer, array->text, (size_t)array->text_bytes)));
    for (Py_ssize_t i = 0; sound && i < array->chunks; i++)
        sound = reads(folder, names[i], buffer, array->stored) &&
                chunk_is_sound(array, buffer, array->crcs + i * CRC_BYTES);
    close(folder);
    return sound;
}

/* Takes an array out of its tuple; its number of chunks, -1 with an error set. Formats with lengths are
 * avoided: what they need depends on whose headers a stable interface was built with. */
static Py_ssize_t unpack(PyObject *item, struct array *array)
{
    PyObject *text, *crcs;
    char *text_start, *crcs_start;
    Py_ssize_t crc_bytes;

    if (!PyTuple_Check(item)) {
        PyErr_SetString(PyExc_TypeError, "an array is a tuple");
        return -1;
    }
    if (!PyArg_ParseTuple(item, "ssO!O!nO!", &array->folder, &array->document, &PyBytes_Type, &text,
                          &PyTuple_Type, &array->names, &array->stored, &PyBytes_Type, &crcs) ||
        PyBytes_AsStringAndSize(text, &text_start, &array->text_bytes) ||
        PyBytes_AsStringAndSize(crcs, &crcs_start, &crc_bytes))
        return -1;
    array->text = (const uint8_t *)text_start;
    array->crcs = (const uint8_t *)crcs_start;
    array->chunks = PyTuple_Size(array->names);
    if (array->stored < CRC_BYTES || crc_bytes != array->chunks * CRC_BYTES) {
        PyErr_SetString(PyExc_ValueError, "a checksum a chunk, and room for it in each");
        return -1;
    }
    return array->chunks;
}

/* Looks at the arrays of a tuple that nothing can change meanwhile; fills `answers`. */
static int look(PyObject *items, Py_ssize_t count, char *answers)
{
    struct array *arrays = PyMem_Calloc((size_t)count + 1, sizeof *arrays);
    const char **names = NULL;
    uint8_t *buffer = NULL;
    Py_ssize_t all = 0, most = 0, at = 0;
    int done = -1;

    if (!arrays) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_ssize_t chunks = unpack(PyTuple_GetItem(items, i), &arrays[i]);
        if (chunks < 0)
            goto end;
        all += chunks;
        if (arrays[i].stored > most)
            most = arrays[i].stored;
        if (arrays[i].text_bytes > most)
            most = arrays[i].text_bytes;
    }
    names = PyMem_Calloc((size_t)all + 1, sizeof *names);
    buffer = PyMem_Malloc((size_t)most + 1);
    if (!names || !buffer) {
        PyErr_NoMemory();
        goto end;
    }
    for (Py_ssize_t i = 0; i < count; i++)
        for (Py_ssize_t chunk = 0; chunk < arrays[i].chunks; chunk++)
            if (!(names[at++] = PyUnicode_AsUTF8AndSize(PyTuple_GetItem(arrays[i].names, chunk), NULL)))
                goto end;
    Py_BEGIN_ALLOW_THREADS
    at = 0;
    for (Py_ssize_t i = 0; i < count; at += arrays[i++].chunks)
        answers[i] = (char)is_sound(&arrays[i], names + at, buffer);
    Py_END_ALLOW_THREADS
    done = 0;
end:
    PyMem_Free(arrays);
    PyMem_Free(names);
    PyMem_Free(buffer);
    return done;
}

static PyObject *py_sound_arrays(PyObject *self, PyObject *items)
{
    PyObject *answers;
    Py_ssize_t count;

    if (!PyTuple_Check(items)) {
        PyErr_SetString(PyExc_TypeError, "a tuple of arrays");
        return NULL;
    }
    count = PyTuple_Size(items);
    answers = PyBytes_FromStringAndSize(NULL, count);
    if (answers && look(items, count, PyBytes_AsString(answers)))
        Py_CLEAR(answers);
    return answers;
}

static PyMethodDef methods[] = {
    {"sound_arrays", py_sound_arrays, METH_O,
     "sound_arrays(arrays): a byte an array, 1 for one that is as it was saved. Each array is (folder, "
     "name of its document, text of that (empty where it has none), names of its chunks, bytes of a "
     "stored chunk, their crc32c as little-endian words)."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_small_files", "Looks at all files of small arrays.", -1, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__small_files(void)
{
    if (!__builtin_cpu_supports("sse4.2")) {
        PyErr_SetString(PyExc_ImportError, "this processor has no crc32 instruction");
        return NULL;
    }
    return PyModule_Create(&module);
}
