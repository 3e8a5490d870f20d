/* crc32c by carry-less multiplication, with or without a copy on the way.
 *
 * The checksum is folded as in V. Gopal et al., "Fast CRC Computation for Generic Polynomials
 * Using PCLMULQDQ Instruction" (Intel, 2009), for the reflected Castagnoli polynomial; its constants
 * are computed here. What is left after folding is a short message of the same checksum, which the
 * crc32 instruction finishes. Knows memory, not Python and not files.
 */

#pragma once

#if !defined(__x86_64__) || !defined(__linux__)
#error "only for Linux on x86-64; the package works without this module"
#endif

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <immintrin.h>

#define WITH_CRC __attribute__((target("sse4.2,pclmul")))
#define WITH_WIDE __attribute__((target("avx512f,avx512vl,avx512bw,vpclmulqdq,pclmul,sse4.2")))

enum { LINE = 64, AHEAD = 2048, WIDE_BLOCK = 4 * 64, NARROW_BLOCK = 8 * 16 };

/* What multiplies the lower and the upper half of 128 bits that move on by one block. */
struct factors {
    uint64_t low, high;
};

/* A destination in rows of whole lines, each at a multiple of LINE: `left` more bytes go to `at`, and
 * then `turn` sets both for the next row. */
struct lines {
    uint8_t *at;
    size_t left;
    void (*turn)(struct lines *);
};

/* Takes whole blocks, at least one, to a destination at a multiple of LINE, or to lines; to neither
 * where both are NULL. */
typedef uint32_t kernel_fn(struct factors by, uint32_t crc, uint8_t *to, struct lines *lines,
                           const uint8_t *from, size_t bytes);

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

/* Where the next line goes. */
static inline __attribute__((always_inline)) uint8_t *next_line(struct lines *lines, struct lines *now)
{
    if (!now->left) {
        lines->turn(lines);
        *now = *lines;
    }
    now->left -= LINE;
    now->at += LINE;
    return now->at - LINE;
}

WITH_WIDE static inline __attribute__((always_inline)) uint32_t
fold_wide(struct factors by, uint32_t crc, uint8_t *to, struct lines *lines, const uint8_t *from,
          size_t bytes)
{
    enum { LANES = WIDE_BLOCK / 64 };
    struct lines now = {NULL, 0, NULL};
    const __m512i factor =
        _mm512_broadcast_i32x4(_mm_set_epi64x((long long)by.high, (long long)by.low));
    __m512i state[LANES];
    uint8_t rest[WIDE_BLOCK];

    if (lines)
        now = *lines;
#pragma GCC unroll 4
    for (int i = 0; i < LANES; i++) {
        state[i] = _mm512_loadu_si512(from + 64 * i);
        if (lines)
            _mm512_stream_si512((__m512i *)next_line(lines, &now), state[i]);
        else if (to)
            _mm512_stream_si512((__m512i *)(to + 64 * i), state[i]);
    }
    state[0] = _mm512_xor_si512(state[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)crc)));
    for (size_t at = WIDE_BLOCK; at < bytes; at += WIDE_BLOCK) {
#pragma GCC unroll 4
        for (int i = 0; i < LANES; i++) {
            const uint8_t *source = from + at + 64 * i;
            _mm_prefetch((const char *)source + AHEAD, _MM_HINT_T0);
            __m512i next = _mm512_loadu_si512(source);
            if (lines)
                _mm512_stream_si512((__m512i *)next_line(lines, &now), next);
            else if (to)
                _mm512_stream_si512((__m512i *)(to + at + 64 * i), next);
            state[i] = _mm512_ternarylogic_epi64(
                _mm512_clmulepi64_epi128(state[i], factor, 0x00),
                _mm512_clmulepi64_epi128(state[i], factor, 0x11), next, 0x96);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < LANES; i++)
        _mm512_storeu_si512(rest + 64 * i, state[i]);
    if (lines)
        *lines = now;
    return carry(0, rest, WIDE_BLOCK);
}

WITH_CRC static inline __attribute__((always_inline)) uint32_t
fold_narrow(struct factors by, uint32_t crc, uint8_t *to, struct lines *lines, const uint8_t *from,
            size_t bytes)
{
    enum { LANES = NARROW_BLOCK / 16, OF_LINE = LINE / 16 };
    struct lines now = {NULL, 0, NULL};
    uint8_t *line = NULL;
    const __m128i factor = _mm_set_epi64x((long long)by.high, (long long)by.low);
    __m128i state[LANES];
    uint8_t rest[NARROW_BLOCK];

    if (lines)
        now = *lines;
#pragma GCC unroll 8
    for (int i = 0; i < LANES; i++) {
        state[i] = _mm_loadu_si128((const __m128i *)(from + 16 * i));
        if (lines && i % OF_LINE == 0)
            line = next_line(lines, &now);
        if (lines)
            _mm_stream_si128((__m128i *)line + i % OF_LINE, state[i]);
        else if (to)
            _mm_stream_si128((__m128i *)(to + 16 * i), state[i]);
    }
    state[0] = _mm_xor_si128(state[0], _mm_cvtsi32_si128((int)crc));
    for (size_t at = NARROW_BLOCK; at < bytes; at += NARROW_BLOCK) {
        _mm_prefetch((const char *)from + at + AHEAD, _MM_HINT_T0);
        _mm_prefetch((const char *)from + at + AHEAD + LINE, _MM_HINT_T0);
#pragma GCC unroll 8
        for (int i = 0; i < LANES; i++) {
            __m128i next = _mm_loadu_si128((const __m128i *)(from + at + 16 * i));
            if (lines && i % OF_LINE == 0)
                line = next_line(lines, &now);
            if (lines)
                _mm_stream_si128((__m128i *)line + i % OF_LINE, next);
            else if (to)
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
    if (lines)
        *lines = now;
    return carry(0, rest, NARROW_BLOCK);
}

WITH_WIDE static uint32_t run_wide(struct factors by, uint32_t crc, uint8_t *to,
                                   struct lines *lines, const uint8_t *from, size_t bytes)
{
    if (lines)
        return fold_wide(by, crc, NULL, lines, from, bytes);
    return to ? fold_wide(by, crc, to, NULL, from, bytes)
              : fold_wide(by, crc, NULL, NULL, from, bytes);
}

WITH_CRC static uint32_t run_narrow(struct factors by, uint32_t crc, uint8_t *to,
                                    struct lines *lines, const uint8_t *from, size_t bytes)
{
    if (lines)
        return fold_narrow(by, crc, NULL, lines, from, bytes);
    return to ? fold_narrow(by, crc, to, NULL, from, bytes)
              : fold_narrow(by, crc, NULL, NULL, from, bytes);
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
        crc = kernel->run(kernel->by, crc, to, NULL, from, whole);
        if (to)
            _mm_sfence();
    }
    if (to)
        memcpy(to + whole, from + whole, bytes - whole);
    return ~carry(crc, from + whole, bytes - whole);
}
