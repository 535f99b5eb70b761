/* Products with weights of 8 or 4 bits, as `quant/grid.py` describes them, on the CPU.

The inputs are rounded too: each run of 32 to 8 bits with a scale of its own, so that a product is a sum of
whole numbers. The error this adds to an output is at most half of each run's scale times the sum of its
weights' sizes. A row is computed in the same way and order in whatever batch it comes.

Sizes: B rows of x, N width out, D width in, K = D / 32 blocks, rounded up. */

/* The ways to add up a block, the first that the processor has: all give the same bits. */
#if defined(PLAIN) /* for tests */
#elif defined(__ARM_FEATURE_DOTPROD)
#define WITH_NEON
#include <arm_neon.h>
#elif defined(__AVX2__)
#include <immintrin.h>
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define WITH_AVX512
#else
#define WITH_AVX2
#endif
#endif

enum { BLOCK = 32, ACROSS_ROUNDED = 4 };
enum { CODES_AHEAD = 1024 }; /* bytes between the codes that are read and those fetched for later */

/* Inputs in 8 bits, the sum of each block as a number, and its sum of codes times -1. */
typedef struct {
    int8_t *codes;
    float *scales, *sums;
    int32_t *starts;
    int64_t blocks;
    float *rest; /* [B, D]: what rounding took away goes there; NULL: nowhere */
} Rounded;

static inline int64_t blocks_of(const Linear *linear) { return (linear->columns + BLOCK - 1) / BLOCK; }

/* Numbers of float32 that the rounded inputs of `batch` rows take. */
static int64_t rounded_room(int64_t columns, int64_t batch) {
    return batch * ((columns + BLOCK - 1) / BLOCK) * (BLOCK / 4 + 3);
}

static Rounded rounded_in(float *memory, const Linear *linear, int64_t batch) {
    int64_t blocks = blocks_of(linear), all = batch * blocks;
    float *scales = memory + all * BLOCK / 4;
    return (Rounded){(int8_t *)memory, scales, scales + all, (int32_t *)(scales + 2 * all), blocks, NULL};
}

/* Round the rows of x from `first` until `stop`; those of a smooth layer are multiplied first. */
static void round_rows(const Linear *linear, const float *x, int64_t first, int64_t stop, Rounded *to) {
    int64_t D = linear->columns;
    for (int64_t b = first; b < stop; b++)
        for (int64_t k = 0; k < to->blocks; k++) {
            float values[BLOCK] = {0}, most;
            uint32_t bits[BLOCK], largest = 0; /* sizes are in the order of their bits */
            int64_t at = k * BLOCK, count = D - at < BLOCK ? D - at : BLOCK, place = b * to->blocks + k;
            memcpy(values, x + b * D + at, count * sizeof(float));
            if (linear->smooth)
                for (int64_t i = 0; i < count; i++) values[i] *= linear->smooth[at + i];
            memcpy(bits, values, sizeof bits);
            for (int i = 0; i < BLOCK; i++) {
                uint32_t size = bits[i] & 0x7fffffff;
                largest = size > largest ? size : largest;
            }
            memcpy(&most, &largest, sizeof most);
            float odd = 0 * most; /* not a number where one is not, or is infinite */
            float inverse = most > 0 ? 127 / most : 0;
            int32_t sum = 0;
            for (int i = 0; i < BLOCK; i++) {
                int32_t code = (int32_t)rintf(values[i] * inverse);
                to->codes[place * BLOCK + i] = code;
                sum += code;
            }
            to->scales[place] = most / 127 + odd;
            to->sums[place] = to->scales[place] * sum;
            to->starts[place] = -sum;
            for (int64_t i = 0; to->rest && i < count; i++)
                to->rest[b * D + at + i] = values[i] - to->scales[place] * to->codes[place * BLOCK + i];
        }
}

/* As many rows at a time as a vector has numbers: tiles of four rows and 32 columns, below each other. */
enum { TILES = LANES / 4 };
typedef int32_t Whole __attribute__((vector_size(4 * LANES), aligned(4)));

/* The codes of tiles: of each eight pieces, four columns of every row. Those of four bits are 8 too large,
those of eight bits SHIFT. */
typedef struct {
#if defined(WITH_NEON)
    int8x16_t piece[8];
#elif defined(WITH_AVX512)
    __m512i part[TILES][2];
#elif defined(WITH_AVX2)
    __m256i part[TILES][4];
#else
    int8_t piece[TILES][8][16];
#endif
} Codes;

#if defined(WITH_AVX512)
enum { SHIFT = 128 }; /* its products take codes without a sign */
#else
enum { SHIFT = 0 };
#endif

ALWAYS Codes read_codes(const uint8_t *const *tiles, int64_t place, const int bits) {
    Codes codes;
#if defined(WITH_NEON)
    const uint8_t *at = tiles[0] + place;
    if (bits == 4) {
        _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) {
            uint8x16_t both = vld1q_u8(at + 16 * i);
            codes.piece[i] = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));
            codes.piece[i + 4] = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
        }
    } else
        _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) codes.piece[i] =
            vld1q_s8((const int8_t *)at + 16 * i);
#elif defined(WITH_AVX512)
    __m512i low = _mm512_set1_epi8(15), sign = _mm512_set1_epi8(-128);
    EACH(t, TILES) {
        __m512i first = _mm512_loadu_si512(tiles[t] + place);
        if (bits == 4) {
            codes.part[t][0] = _mm512_and_si512(first, low);
            codes.part[t][1] = _mm512_and_si512(_mm512_srli_epi16(first, 4), low);
        } else {
            codes.part[t][0] = _mm512_xor_si512(first, sign);
            codes.part[t][1] = _mm512_xor_si512(_mm512_loadu_si512(tiles[t] + place + 64), sign);
        }
    }
#elif defined(WITH_AVX2)
    EACH(t, TILES) EACH(i, 4) {
        __m256i read = _mm256_loadu_si256((const __m256i *)(tiles[t] + place) + (bits == 4 ? i % 2 : i));
        if (bits == 4 && i >= 2) read = _mm256_srli_epi16(read, 4);
        codes.part[t][i] = bits == 4 ? _mm256_and_si256(read, _mm256_set1_epi8(15)) : read;
    }
#else
    for (int t = 0; t < TILES; t++) {
        const uint8_t *at = tiles[t] + place;
        int8_t *to = codes.piece[t][0];
        if (bits == 4)
            for (int i = 0; i < 64; i++) to[i] = at[i] & 15, to[i + 64] = at[i] >> 4;
        else
            memcpy(to, at, 128);
    }
#endif
    return codes;
}

/* `start` and the products of a block of x with the rows of the tiles, a sum for each row. */
ALWAYS Whole block_dot(const Codes *w, const int8_t *x, int32_t start, const int bits) {
#if defined(WITH_NEON)
    int8x16_t first = vld1q_s8(x), last = vld1q_s8(x + 16);
    int32x4_t one = vdupq_n_s32(start), two = vdupq_n_s32(0);
    one = vdotq_laneq_s32(one, w->piece[0], first, 0);
    two = vdotq_laneq_s32(two, w->piece[4], last, 0);
    one = vdotq_laneq_s32(one, w->piece[1], first, 1);
    two = vdotq_laneq_s32(two, w->piece[5], last, 1);
    one = vdotq_laneq_s32(one, w->piece[2], first, 2);
    two = vdotq_laneq_s32(two, w->piece[6], last, 2);
    one = vdotq_laneq_s32(one, w->piece[3], first, 3);
    two = vdotq_laneq_s32(two, w->piece[7], last, 3);
    return (Whole)vaddq_s32(one, two);
#elif defined(WITH_AVX512)
    __m512i each = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3), inputs[2], sums[TILES];
    EACH(i, 2) { /* the four inputs of a piece, once for each of its rows */
        __m512i read = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)x + i));
        inputs[i] = _mm512_permutexvar_epi32(each, read);
    }
    EACH(t, TILES) {
        sums[t] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), w->part[t][0], inputs[0]);
        sums[t] = _mm512_dpbusd_epi32(sums[t], w->part[t][1], inputs[1]);
    }
    __m512i half[2]; /* quarters of a register are pieces here, and tiles in the end */
    EACH(i, 2)
        half[i] = _mm512_add_epi32(_mm512_shuffle_i64x2(sums[2 * i], sums[2 * i + 1], 0x44),
                                   _mm512_shuffle_i64x2(sums[2 * i], sums[2 * i + 1], 0xee));
    return (Whole)_mm512_add_epi32(_mm512_shuffle_i64x2(half[0], half[1], 0x88),
                                   _mm512_shuffle_i64x2(half[0], half[1], 0xdd)) + start;
#elif defined(WITH_AVX2)
    __m256i each = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1), sums[TILES];
    EACH(t, TILES) sums[t] = _mm256_setzero_si256();
    EACH(i, 4) {
        __m256i read = _mm256_castsi128_si256(_mm_loadl_epi64((const __m128i *)(x + 8 * i)));
        __m256i inputs = _mm256_permutevar8x32_epi32(read, each);
        EACH(t, TILES) { /* two products are at most 2 * 128 * 127, which fits into 16 bits */
            __m256i codes = w->part[t][i], signs = bits == 8 ? _mm256_sign_epi8(inputs, codes) : inputs;
            __m256i pairs = _mm256_maddubs_epi16(bits == 8 ? _mm256_abs_epi8(codes) : codes, signs);
            sums[t] = _mm256_add_epi32(sums[t], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
        }
    }
    return (Whole)_mm256_add_epi32(_mm256_permute2x128_si256(sums[0], sums[1], 0x20),
                                   _mm256_permute2x128_si256(sums[0], sums[1], 0x31)) + start;
#else
    int32_t sums[LANES];
    for (int r = 0; r < LANES; r++) {
        sums[r] = start;
        for (int i = 0; i < 8; i++)
            for (int j = 0; j < 4; j++) sums[r] += w->piece[r / 4][i][r % 4 * 4 + j] * x[4 * i + j];
    }
    Whole found;
    memcpy(&found, sums, sizeof found);
    return found;
#endif
}

/* One number of bfloat16 for each row, four of a tile side by side. */
ALWAYS Vector from_bfloat16(const uint16_t *const *tiles, int64_t place) {
#if defined(WITH_NEON)
    return (Vector)vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(tiles[0] + place), 16));
#else
    typedef uint16_t Half __attribute__((vector_size(2 * LANES)));
    union { uint64_t fours[TILES]; Half all; } read;
    EACH(t, TILES) memcpy(&read.fours[t], tiles[t] + place, sizeof read.fours[t]);
#if defined(WITH_AVX512) /* in one step, of which compilers make four */
    return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)read.all), 16);
#else
    typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
    return (Vector)(__builtin_convertvector(read.all, Bits) << 16);
#endif
#endif
}

static inline float one_bfloat16(uint16_t number) {
    uint32_t bits = (uint32_t)number << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Tiles of a weight, the first from row n, `share` tiles from each other, with C rows of rounded inputs, from
row b. */
ALWAYS void rounded_tile(const int bits, const int C, const int offset, const Linear *linear, int64_t n,
                         int64_t share, int64_t stop, const Rounded *x, int64_t b, float *y, int64_t stride) {
    const int64_t K = x->blocks, per = linear->group / BLOCK, G = (K + per - 1) / per;
    const int64_t width = BLOCK * bits / 2, last = (linear->rows - 1) / 4, apart = QUARTERS ? share : 1;
    const uint8_t *codes[TILES];
    const uint16_t *scales[TILES], *offsets[TILES];
    EACH(t, TILES) {
        int64_t tile = n / 4 + t * apart;
        if (tile > last) tile = last; /* past the end: the last once more */
        codes[t] = linear->codes + tile * K * width;
        scales[t] = linear->scales + tile * G * 4;
        offsets[t] = linear->offsets + (offset ? tile * G * 4 : 0);
    }
    const int8_t *inputs = x->codes + b * K * BLOCK;
    const float *input_scales = x->scales + b * K, *sums_of = x->sums + b * K;
    const int32_t *starts = x->starts + b * K;
    Vector sums[4];
    EACH(c, C) sums[c] = (Vector){0};
    for (int64_t g = 0, k = 0; g < G; g++) {
        Vector scale = from_bfloat16(scales, 4 * g);
        Vector added = offset ? from_bfloat16(offsets, 4 * g) : (Vector){0};
        for (int64_t end = k + per < K ? k + per : K; k < end; k++) {
            EACH(t, TILES) {
                __builtin_prefetch(codes[t] + k * width + CODES_AHEAD);
                if (bits == 8) __builtin_prefetch(codes[t] + k * width + CODES_AHEAD + 64);
            }
            Codes w = read_codes(codes, k * width, bits);
            EACH(c, C) {
                int32_t start = starts[c * K + k] * (bits == 4 ? 8 : SHIFT);
                Whole found = block_dot(&w, inputs + (c * K + k) * BLOCK, start, bits);
                sums[c] += __builtin_convertvector(found, Vector) * (scale * input_scales[c * K + k]);
                if (offset) sums[c] += added * sums_of[c * K + k];
            }
        }
    }
    for (int r = 0; r < LANES; r++) {
        int64_t row = n + r / 4 * 4 * apart + r % 4;
        for (int c = 0; c < C && row < stop; c++)
            y[(b + c) * stride + row] = sums[c][r] + (linear->bias ? linear->bias[row] : 0);
    }
}

typedef void RoundedTile(const Linear *, int64_t, int64_t, int64_t, const Rounded *, int64_t, float *, int64_t);
#define ROUNDED(BITS, C)                                                                                   \
    static void rounded_##BITS##_##C(const Linear *linear, int64_t n, int64_t share, int64_t stop,         \
                                     const Rounded *x, int64_t b, float *y, int64_t stride) {              \
        if (linear->offsets)                                                                               \
            rounded_tile(BITS, C, 1, linear, n, share, stop, x, b, y, stride);                             \
        else                                                                                               \
            rounded_tile(BITS, C, 0, linear, n, share, stop, x, b, y, stride);                             \
    }
ROUNDED(4, 1)
ROUNDED(4, 2)
ROUNDED(4, 3)
ROUNDED(4, 4)
ROUNDED(8, 1)
ROUNDED(8, 2)
ROUNDED(8, 3)
ROUNDED(8, 4)

/* y [B, stride] = x Wᵀ + bias for the rows of W from `first`, a multiple of four, until `stop`. */
static void rounded_product(const Linear *linear, const Rounded *x, int64_t batch, float *y, int64_t stride,
                            int64_t first, int64_t stop) {
    static RoundedTile *const four[] = {rounded_4_1, rounded_4_2, rounded_4_3, rounded_4_4};
    static RoundedTile *const eight[] = {rounded_8_1, rounded_8_2, rounded_8_3, rounded_8_4};
    RoundedTile *const *tiles = linear->bits == 4 ? four : eight;
    int64_t share = ((stop - first + 3) / 4 + TILES - 1) / TILES; /* tiles, if each is of another share */
    int64_t end = QUARTERS ? first + 4 * share : stop;
    for (int64_t n = first; n < end; n += QUARTERS ? 4 : LANES)
        for (int64_t b = 0; b < batch; b += ACROSS_ROUNDED) {
            int64_t count = batch - b < ACROSS_ROUNDED ? batch - b : ACROSS_ROUNDED;
            tiles[count - 1](linear, n, share, stop, x, b, y, stride);
        }
}

/* Some rows of a weight as numbers: y [count, D]; 1 where there is no such row. */
int clearhead_rows(const Linear *linear, const int64_t *rows, int64_t count, float *y) {
    const int64_t K = blocks_of(linear), D = linear->columns, width = BLOCK * linear->bits / 2;
    const int64_t per = linear->group / BLOCK, G = (K + per - 1) / per;
    for (int64_t i = 0; i < count; i++, y += D) {
        if (rows[i] < 0 || rows[i] >= linear->rows) return 1;
        const int64_t tile = rows[i] / 4, own = rows[i] % 4;
        const uint8_t *codes = linear->codes + tile * K * width;
        for (int64_t k = 0; k < K; k++, codes += width) {
            const int64_t at = (tile * G + k / per) * 4 + own, left = D - k * BLOCK;
            float scale = one_bfloat16(linear->scales[at]);
            float offset = linear->offsets ? one_bfloat16(linear->offsets[at]) : 0;
            for (int64_t d = 0; d < BLOCK && d < left; d++) {
                int64_t place = d / 4 * 16 + own * 4 + d % 4;
                int code = linear->bits == 8 ? (int8_t)codes[place] : codes[place % 64];
                if (linear->bits == 4) code = (place < 64 ? code & 15 : code >> 4) - 8;
                float value = code * scale + offset; /* a code times a scale is exact */
                y[k * BLOCK + d] = linear->smooth ? value * linear->smooth[k * BLOCK + d] : value;
            }
        }
    }
    return 0;
}
