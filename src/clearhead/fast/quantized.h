/* Products with weights of 8 or 4 bits, as `quant/grid.py` describes them, on the CPU.

The inputs are rounded too: each run of 32 to 8 bits with a scale of its own, so that a product is a sum of
whole numbers. The error this adds to an output is at most half of each run's scale times the sum of its
weights' sizes. A row is computed in the same way and order in whatever batch it comes.

Sizes: B rows of x, N width out, D width in, K = D / 32 blocks, rounded up. */

#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

enum { BLOCK = 32, ACROSS_ROUNDED = 4 };

/* Inputs in 8 bits, the sum of each block as a number, and -8 times its sum of codes. */
typedef struct {
    int8_t *codes;
    float *scales, *sums;
    int32_t *starts;
    int64_t blocks;
} Rounded;

static inline int64_t blocks_of(const Linear *linear) { return (linear->columns + BLOCK - 1) / BLOCK; }

/* Numbers of float32 that the rounded inputs of `batch` rows take. */
static int64_t rounded_room(int64_t columns, int64_t batch) {
    return batch * ((columns + BLOCK - 1) / BLOCK) * (BLOCK / 4 + 3);
}

static Rounded rounded_in(float *memory, const Linear *linear, int64_t batch) {
    int64_t blocks = blocks_of(linear), all = batch * blocks;
    float *scales = memory + all * BLOCK / 4;
    return (Rounded){(int8_t *)memory, scales, scales + all, (int32_t *)(scales + 2 * all), blocks};
}

/* Round the rows of x from `first` until `stop`; those of a smooth layer are multiplied first. */
static void round_rows(const Linear *linear, const float *x, int64_t first, int64_t stop, Rounded *to) {
    int64_t D = linear->columns;
    for (int64_t b = first; b < stop; b++)
        for (int64_t k = 0; k < to->blocks; k++) {
            float values[BLOCK] = {0}, most = 0, odd = 0;
            int64_t at = k * BLOCK, count = D - at < BLOCK ? D - at : BLOCK, place = b * to->blocks + k;
            memcpy(values, x + b * D + at, count * sizeof(float));
            if (linear->smooth)
                for (int64_t i = 0; i < count; i++) values[i] *= linear->smooth[at + i];
            for (int i = 0; i < BLOCK; i++) {
                float size = fabsf(values[i]);
                most = size > most ? size : most;
                odd += 0 * size; /* not a number where one is not, or is infinite */
            }
            float inverse = most > 0 ? 127 / most : 0;
            int32_t sum = 0;
            for (int i = 0; i < BLOCK; i++) {
                int32_t code = (int32_t)rintf(values[i] * inverse);
                to->codes[place * BLOCK + i] = code;
                sum += code;
            }
            to->scales[place] = most / 127 + odd;
            to->sums[place] = to->scales[place] * sum;
            to->starts[place] = -8 * sum;
        }
}

static inline float from_bfloat16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

typedef float Four __attribute__((vector_size(16), aligned(4)));
typedef int32_t FourWhole __attribute__((vector_size(16), aligned(4)));

/* The codes of four rows and 32 columns: eight tiles, each four columns of every row. Those of four bits are 8
too large. */
typedef struct {
#if defined(__ARM_FEATURE_DOTPROD)
    int8x16_t tile[8];
#else
    int8_t tile[8][16];
#endif
} Codes;

#define ALWAYS static inline __attribute__((always_inline))

ALWAYS Codes read_codes(const uint8_t *at, const int bits) {
    Codes codes;
#if defined(__ARM_FEATURE_DOTPROD)
    if (bits == 4) {
        _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) {
            uint8x16_t both = vld1q_u8(at + 16 * i);
            codes.tile[i] = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));
            codes.tile[i + 4] = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
        }
    } else
        _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) codes.tile[i] =
            vld1q_s8((const int8_t *)at + 16 * i);
#else
    if (bits == 4)
        for (int i = 0; i < 64; i++)
            codes.tile[i / 16][i % 16] = at[i] & 15, codes.tile[i / 16 + 4][i % 16] = at[i] >> 4;
    else
        memcpy(codes.tile, at, sizeof codes.tile);
#endif
    return codes;
}

/* `start` and the products of a block of x with four rows, a sum for each. */
ALWAYS FourWhole block_dot(const Codes *w, const int8_t *x, int32_t start) {
#if defined(__ARM_FEATURE_DOTPROD)
    int8x16_t first = vld1q_s8(x), last = vld1q_s8(x + 16);
    int32x4_t one = vdupq_n_s32(start), two = vdupq_n_s32(0);
    one = vdotq_laneq_s32(one, w->tile[0], first, 0);
    two = vdotq_laneq_s32(two, w->tile[4], last, 0);
    one = vdotq_laneq_s32(one, w->tile[1], first, 1);
    two = vdotq_laneq_s32(two, w->tile[5], last, 1);
    one = vdotq_laneq_s32(one, w->tile[2], first, 2);
    two = vdotq_laneq_s32(two, w->tile[6], last, 2);
    one = vdotq_laneq_s32(one, w->tile[3], first, 3);
    two = vdotq_laneq_s32(two, w->tile[7], last, 3);
    return (FourWhole)vaddq_s32(one, two);
#else
    FourWhole sums = {start, start, start, start};
    for (int i = 0; i < 8; i++)
        for (int r = 0; r < 4; r++)
            for (int j = 0; j < 4; j++) sums[r] += (int32_t)w->tile[i][4 * r + j] * x[4 * i + j];
    return sums;
#endif
}

ALWAYS Four four_bfloat16(const uint16_t *at) {
#if defined(__ARM_FEATURE_DOTPROD)
    return (Four)vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(at), 16));
#else
    return (Four){from_bfloat16(at[0]), from_bfloat16(at[1]), from_bfloat16(at[2]), from_bfloat16(at[3])};
#endif
}

/* Four rows of a weight, from row n, with C rows of rounded inputs, from row b. */
ALWAYS void rounded_tile(const int bits, const int C, const int offset, const Linear *linear, int64_t n,
                         const Rounded *x, int64_t b, float *y, int64_t stride) {
    const int64_t K = x->blocks, per = linear->group / BLOCK, G = (K + per - 1) / per;
    const int64_t width = BLOCK * bits / 2;
    const uint8_t *codes = linear->codes + n / 4 * K * width;
    const uint16_t *scales = linear->scales + n * G, *offsets = linear->offsets + (offset ? n * G : 0);
    const int8_t *inputs = x->codes + b * K * BLOCK;
    const float *input_scales = x->scales + b * K, *sums_of = x->sums + b * K;
    const int32_t *starts = x->starts + b * K;
    Four sums[4];
    EACH(c, C) sums[c] = (Four){0};
    for (int64_t g = 0, k = 0; g < G; g++, scales += 4) {
        Four scale = four_bfloat16(scales), added = offset ? four_bfloat16(offsets + 4 * g) : (Four){0};
        for (int64_t stop = k + per < K ? k + per : K; k < stop; k++, codes += width) {
            __builtin_prefetch(codes + 1024);
            if (bits == 8) __builtin_prefetch(codes + 1088);
            Codes w = read_codes(codes, bits);
            EACH(c, C) {
                int32_t start = bits == 4 ? starts[c * K + k] : 0;
                FourWhole found = block_dot(&w, inputs + (c * K + k) * BLOCK, start);
                sums[c] += __builtin_convertvector(found, Four) * (scale * input_scales[c * K + k]);
                if (offset) sums[c] += added * sums_of[c * K + k];
            }
        }
    }
    for (int r = 0; r < 4 && n + r < linear->rows; r++)
        for (int c = 0; c < C; c++)
            y[(b + c) * stride + n + r] = sums[c][r] + (linear->bias ? linear->bias[n + r] : 0);
}

typedef void RoundedTile(const Linear *, int64_t, const Rounded *, int64_t, float *, int64_t);
#define ROUNDED(BITS, C)                                                                                   \
    static void rounded_##BITS##_##C(const Linear *linear, int64_t n, const Rounded *x, int64_t b,         \
                                     float *y, int64_t stride) {                                           \
        if (linear->offsets)                                                                               \
            rounded_tile(BITS, C, 1, linear, n, x, b, y, stride);                                          \
        else                                                                                               \
            rounded_tile(BITS, C, 0, linear, n, x, b, y, stride);                                          \
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
    for (int64_t n = first; n < stop; n += 4)
        for (int64_t b = 0; b < batch; b += ACROSS_ROUNDED)
            tiles[(batch - b < ACROSS_ROUNDED ? batch - b : ACROSS_ROUNDED) - 1](linear, n, x, b, y, stride);
}
