/* Takes the bytes of whole files that are in memory: from a mapping, or by read(2).
 *
 * Says no, by 0, to whatever is out of the ordinary. Knows descriptors and sinks; needs no
 * interpreter.
 */

#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "_copy_rows.h"

/* Of a file, below which nobody asks whether it is in memory: reading it costs no more; and below which
 * it is not mapped: a page table has entries for as much. */
enum { MIN_ASKED_BYTES = 128 * 1024, MIN_MAPPED_BYTES = 2 * 1024 * 1024 };
/* What is read at a time: a part of the second nearest cache. */
enum { PIECE_BYTES = 256 * 1024 };
/* The system call's number on x86-64: headers may be older than the kernel. */
enum { CACHESTAT = 451 };

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

/* The same by read(2), piece by piece; 0 where one came up short, or the file is large and most of it not in memory. */
static int take_in_pieces(int fd, struct sink *sink, size_t bytes, const Py_buffer *tail,
                          uint8_t *piece)
{
    const size_t all = bytes + (size_t)tail->len;
    int flags = all < MIN_ASKED_BYTES ? 0 : RWF_NOWAIT;
    size_t at = 0;

    do {
        const size_t size = bytes - at < PIECE_BYTES ? bytes - at : PIECE_BYTES;
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

/* Takes a file, if there is one of just that many bytes; `piece` is PIECE_BYTES to read into. */
static int take_file(const char *name, struct sink *sink, size_t bytes, const Py_buffer *tail,
                     uint8_t *piece)
{
    struct stat about;
    int taken = 0, fd = open(name, O_RDONLY | O_CLOEXEC);

    if (fd < 0)
        return 0;
    if (!fstat(fd, &about) && (size_t)about.st_size == bytes + (size_t)tail->len)
        taken = take_mapped(fd, sink, bytes, tail) ||
                take_in_pieces(fd, sink, bytes, tail, piece);
    close(fd);
    return taken;
}
