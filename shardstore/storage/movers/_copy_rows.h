/* Copies between memory of one piece and memory in rows, the crc32c taken on the way.
 *
 * Knows Python's buffers for their shape alone; nothing here needs the interpreter, nor files. The
 * kernels are those of _crc_kernels.h.
 */

#pragma once

#include <Python.h>

#include "_crc_kernels.h"

/* What is copied, or summed, while it is in the nearest cache. */
enum { SPREAD_BYTES = 16 * 1024, MOST_AXES = 64 };

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
