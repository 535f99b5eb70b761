/* One token of each row through blocks, and linear layers of a few rows: float32, on the CPU.

A decode step reads every weight once. These functions read them as they lie in the model, keep all that is
small in the cache, and meet at a barrier where threads need each other's results. Everything else each thread
computes for itself, since that is quicker than waiting. The threads are PyTorch's own (GNU OpenMP).

Sizes: B rows, D width of the stream, N width out, H heads, K key/value heads, E head width, S slots. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

extern void GOMP_parallel(void (*work)(void *), void *data, unsigned threads, unsigned flags);
extern void GOMP_barrier(void);
extern int omp_get_thread_num(void);
extern int omp_get_num_threads(void);

/* Filled in by `native.py`; `library.py` reads these declarations. */
enum { NO_NORM, LAYER_NORM, RMS_NORM };
typedef struct { const float *weight, *bias; int64_t kind, unit_offset; double eps; } Norm;
typedef struct {
    const float *weight, *bias; /* no weight: codes of 8 or 4 bits, see `quantized.h` */
    int64_t rows, columns;      /* no rows: there is no such layer */
    const uint8_t *codes;
    const uint16_t *scales, *offsets;
    const float *smooth;
    int64_t bits, group;
    int64_t twice; /* 1: what rounding takes from the inputs goes through a second product */
} Linear;
typedef struct { Norm before, inside, after; double scale; } Residual;
typedef struct {
    Linear q, k, v, out;
    Norm q_norm, k_norm;
    const float *sink;
    int64_t heads, kv_heads, width, value_width, whole_norm, interleaved;
    double scale, softcap;
} Attention;
typedef struct { Linear gate, up, down; int64_t activation; } FeedForward;
typedef struct {
    Attention attention, cross;
    FeedForward feedforward;
    Residual attention_residual, cross_residual, feedforward_residual;
    int64_t width, parallel;
} Block;
typedef struct {
    float *keys, *values; /* B' K S E; B' divides B: as many rows share one row of keys */
    int64_t key_row, key_head, key_slot, value_row, value_head, value_slot, shared_by, slots;
    const uint8_t *mask; /* 1: may be seen; NULL: all */
    int64_t mask_row, mask_slot;
    const float *bias;
    int64_t bias_row, bias_head, bias_slot;
    const int64_t *table; /* of each row the blocks of slots that it reads, one after the other; NULL: all */
    int64_t table_row, block;
} View;
typedef struct {
    const float *x;
    float *out;
    int64_t batch;
    View own, source;
    int64_t slot; /* where the new keys go; or for each row in `slots` */
    const int64_t *slots;
    int64_t slots_row;
    const float *cos, *sin;
    int64_t rotary_row, rotated, threads;
    int64_t alike; /* 1: add up each row in one order, whatever the number of rows */
} Call;
/* A block with its keys and values, which lie as those of its call: a call is for all layers of one view. */
typedef struct {
    const Block *block;
    const Call *call;
    float *keys, *values, *source_keys, *source_values;
} Layer;

#if defined(__AVX512F__) && defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define LANES 16
#include <immintrin.h>
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#define AHEAD 256 /* numbers between what is read and what is fetched for later */
#define TALL_AHEAD 512 /* the same, in each of the rows of a weight that are read side by side */
#define ACROSS (LANES == 8 ? 3 : 4) /* rows of a tile: as many as registers hold */
typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4)));
typedef float Four __attribute__((vector_size(16), aligned(4)));
typedef struct { int64_t number, count; } Thread;

/* By fours first: a sum one by one takes as long as the products before it. */
static inline float total(Vector v) {
    union { Vector all; Four fours[LANES / 4]; } split = {v};
    Four sum = split.fours[0];
    for (int i = 1; i < LANES / 4; i++) sum += split.fours[i];
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

static inline Vector load(const float *at) { return *(const Vector *)at; }

#define EACH(i, count) _Pragma("GCC unroll 8") for (int i = 0; i < count; i++)
#define ALWAYS static inline __attribute__((always_inline))

/* Four rows of a weight are read side by side: four that follow each other, or on x86 one of each quarter of a
thread's share, so that each quarter is read in a line. An Intel core fetches ahead within a page of memory, and
only where it has seen a line begin: four long ones come quicker than one, or than four that end at every row. */
#ifdef __x86_64__
#define QUARTERS 1
#else
#define QUARTERS 0
#endif

/* Of R rows of a weight, `apart` rows from each other: fetch what comes after column d, once for each line of
memory. Past the ends of rows that follow each other that is in the next R, which no processor expects by
itself. */
#define FETCH(R, w, apart, d, D)                                                                           \
    if (d % 16 == 0) {                                                                                     \
        int64_t later = d + (apart > 1 || D > TALL_AHEAD ? TALL_AHEAD : D);                                \
        if (apart == 1 && later >= D) later += (R - 1) * D;                                                \
        EACH(r, R) __builtin_prefetch(w + r * apart * D + later);                                          \
    }

/* One row of a weight with C rows of x. Read in a line, it comes as fast as memory gives it. */
#define ONE_ROW(C)                                                                                         \
    static void one_row_##C(const float *w, int64_t apart, const float *x, int64_t D, float *y,            \
                            int64_t stride, const float *bias) {                                           \
        (void)apart;                                                                                       \
        Vector sums[C][4];                                                                                 \
        EACH(c, C) EACH(l, 4) sums[c][l] = (Vector){0};                                                    \
        int64_t d = 0;                                                                                     \
        for (; d + 4 * LANES <= D; d += 4 * LANES) {                                                       \
            __builtin_prefetch(w + d + AHEAD);                                                             \
            EACH(l, 4) {                                                                                   \
                Vector weights = load(w + d + l * LANES);                                                  \
                EACH(c, C) sums[c][l] += weights * load(x + c * D + d + l * LANES);                        \
            }                                                                                              \
        }                                                                                                  \
        EACH(c, C) {                                                                                       \
            float sum = total((sums[c][0] + sums[c][1]) + (sums[c][2] + sums[c][3]));                      \
            for (int64_t e = d; e < D; e++) sum += w[e] * x[c * D + e];                                    \
            y[c * stride] = sum + (bias ? *bias : 0);                                                      \
        }                                                                                                  \
    }
ONE_ROW(1)
ONE_ROW(2)
ONE_ROW(3)
ONE_ROW(4)

/* Of two vectors side by side, the numbers from `past` on. */
#if LANES == 16
typedef int32_t Shift __attribute__((vector_size(64)));
ALWAYS Vector shifted(Vector first, Vector next, int32_t past) {
    Shift by = past + (Shift){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (Vector)_mm512_permutex2var_ps((__m512)first, (__m512i)by, (__m512)next);
}
#else
#define shifted(first, next, past) (next)
#endif

/* Four rows of a weight with C rows of x: what is read is used more often. Where a mapped file begins a tensor
within a line of the cache, `past` numbers from its start, a vector as wide as a line would lie across two, which
takes an eighth longer: whole lines are read and shifted. The same numbers are added up in the same order. */
ALWAYS void four_rows(const int C, const int split, const float *w, int64_t quarter, const float *x, int64_t D,
                      float *y, int64_t stride, const float *bias) {
    const int64_t apart = QUARTERS ? quarter : 1, past = split ? (uintptr_t)w % 64 / 4 : 0;
    Vector sums[4][4], line[4];
    EACH(r, 4) EACH(c, C) sums[r][c] = (Vector){0};
    if (split) EACH(r, 4) line[r] = load(w + r * apart * D - past);
    int64_t d = 0;
    for (; d + LANES <= D; d += LANES) {
        FETCH(4, w, apart, d, D)
        Vector xs[4];
        EACH(c, C) xs[c] = load(x + c * D + d);
        EACH(r, 4) {
            Vector weights = load(w + r * apart * D + d + (split ? LANES - past : 0));
            if (split) {
                Vector next = weights;
                weights = shifted(line[r], next, past);
                line[r] = next;
            }
            EACH(c, C) sums[r][c] += weights * xs[c];
        }
    }
    EACH(r, 4) EACH(c, C) {
        float sum = total(sums[r][c]);
        for (int64_t e = d; e < D; e++) sum += w[r * apart * D + e] * x[c * D + e];
        y[c * stride + r * apart] = sum + (bias ? bias[r * apart] : 0);
    }
}
#define FOUR_ROWS(C)                                                                                       \
    static void four_rows_##C(const float *w, int64_t quarter, const float *x, int64_t D, float *y,        \
                              int64_t stride, const float *bias) {                                         \
        if (LANES == 16 && (uintptr_t)w % 64 && D % 16 == 0)                                               \
            four_rows(C, 1, w, quarter, x, D, y, stride, bias);                                            \
        else                                                                                               \
            four_rows(C, 0, w, quarter, x, D, y, stride, bias);                                            \
    }
FOUR_ROWS(1)
FOUR_ROWS(2)
FOUR_ROWS(3)
FOUR_ROWS(4)

typedef void Tile(const float *, int64_t, const float *, int64_t, float *, int64_t, const float *);

/* A thread's share of the numbers below `count`, which begins at a multiple of four. */
static int64_t from(int64_t count, Thread thread) {
    return thread.number == thread.count ? count : count * thread.number / thread.count / 4 * 4;
}
static int64_t until(int64_t count, Thread thread) {
    return from(count, (Thread){thread.number + 1, thread.count});
}

/* Memory for so many numbers that begins at a line of the cache, and how many fill whole lines: a vector that
lies across two of them is read in two steps. */
static int64_t lines(int64_t count) { return (count + 15) / 16 * 16; }
static float *in_lines(int64_t count) { return aligned_alloc(64, lines(count) * sizeof(float)); }

#include "transpose.h"
#include "gemm.h"
#include "quantized.h"

/* Where a thread rounds inputs of quantized layers, or lays rows side by side, and what is there now. */
typedef struct { float *memory; const float *x, *smooth; int64_t laid; } Room;

/* Numbers of float32 that a thread needs for that. */
static int64_t room_of(int64_t columns, int64_t batch) {
    int64_t rounded = rounded_room(columns, batch), laid = panel_room(columns, batch);
    return rounded > laid ? rounded : laid;
}

/* Row n of a weight, or four from there, `apart` rows from each other, with all rows of x. */
static void across(const Linear *linear, int64_t n, int64_t rows, int64_t apart, const float *x, int64_t batch,
                   float *y, int64_t stride) {
    static Tile *const single[] = {one_row_1, one_row_2, one_row_3, one_row_4};
    static Tile *const several[] = {four_rows_1, four_rows_2, four_rows_3, four_rows_4};
    int64_t D = linear->columns;
    for (int64_t b = 0, count; b < batch; b += count) {
        count = batch - b < ACROSS ? batch - b : ACROSS;
        Tile *tile = (rows == 1 ? single : several)[count - 1];
        tile(linear->weight + n * D, apart, x + b * D, D, y + b * stride + n, stride,
             linear->bias ? linear->bias + n : NULL);
    }
}

/* The thread's share of y [B, stride] = x [B, D] Wᵀ + bias in float32; `laid`: x side by side, or NULL. */
static void wide_product(const Linear *linear, const float *x, const float *laid, int64_t batch, float *y,
                         int64_t stride, int64_t alike, Thread thread) {
    int64_t D = linear->columns, n = from(linear->rows, thread), stop = until(linear->rows, thread);
    for (int64_t rows; laid && n + TALL <= stop; n += rows) {
        rows = stop - n < TOGETHER ? (stop - n) / TALL * TALL : TOGETHER;
        panels(linear->weight + n * D, rows, laid, D, batch, y + n, stride,
               linear->bias ? linear->bias + n : NULL);
    }
    if (QUARTERS) {
        int64_t quarter = (stop - n) / 4;
        for (int64_t i = 0; i < quarter; i++) across(linear, n + i, 4, quarter, x, batch, y, stride);
        n += 4 * quarter;
    } else if (batch > 2 || alike)
        for (; n + 4 <= stop; n += 4) across(linear, n, 4, 1, x, batch, y, stride);
    for (; n < stop; n++) across(linear, n, 1, 1, x, batch, y, stride);
}

/* y [B, stride] = x [B, D] Wᵀ + bias, for the thread's share of the rows of W. */
static void matmul(const Linear *linear, const float *x, int64_t batch, float *y, int64_t stride,
                    int64_t alike, Thread thread, Room *room) {
    int64_t laid = !linear->codes, known = room->x == x && room->laid == laid;
    if (laid && (alike || !pays(batch))) {
        wide_product(linear, x, NULL, batch, y, stride, alike, thread);
        return;
    }
    if (laid) {
        if (!known) lay_rows(x, linear->columns, batch, 0, panels_of(batch), room->memory);
        wide_product(linear, x, room->memory, batch, y, stride, alike, thread);
    } else {
        Rounded rounded = rounded_in(room->memory, linear, batch);
        if (!known || room->smooth != linear->smooth) round_rows(linear, x, 0, batch, &rounded);
        rounded_product(linear, &rounded, batch, y, stride, from(linear->rows, thread),
                        until(linear->rows, thread));
    }
    room->x = x, room->smooth = linear->smooth, room->laid = laid;
}

static float dot(const float *a, const float *b, int64_t width) {
    Vector sums[2] = {{0}, {0}};
    int64_t e = 0;
    for (; e + 2 * LANES <= width; e += 2 * LANES) {
        sums[0] += load(a + e) * load(b + e);
        sums[1] += load(a + e + LANES) * load(b + e + LANES);
    }
    float sum = total(sums[0] + sums[1]);
    for (; e < width; e++) sum += a[e] * b[e];
    return sum;
}

static float sum(const float *x, int64_t width) {
    Vector sums = {0};
    int64_t e = 0;
    for (; e + LANES <= width; e += LANES) sums += load(x + e);
    float all = total(sums);
    for (; e < width; e++) all += x[e];
    return all;
}

/* Norm each of `count` runs of `width` numbers. */
static void norm(const Norm *norm, const float *x, float *y, int64_t count, int64_t width) {
    for (int64_t i = 0; i < count; i++, x += width, y += width) {
        float mean = norm->kind == LAYER_NORM ? sum(x, width) / width : 0;
        for (int64_t d = 0; d < width; d++) y[d] = x[d] - mean;
        float factor = 1 / sqrtf(dot(y, y, width) / width + (float)norm->eps);
        for (int64_t d = 0; d < width; d++)
            y[d] = y[d] * factor * (norm->weight[d] + norm->unit_offset) + (norm->bias ? norm->bias[d] : 0);
    }
}

/* x [B, D] += y, with what the residual does to both. */
static void add(const Residual *residual, float *x, float *y, int64_t batch, int64_t D) {
    if (residual->inside.kind) norm(&residual->inside, y, y, batch, D);
    float scale = residual->scale;
    for (int64_t i = 0; i < batch * D; i++) x[i] += y[i] * scale;
    if (residual->after.kind) norm(&residual->after, x, x, batch, D);
}

static void rotate(float *head, const float *cos, const float *sin, int64_t R, int64_t interleaved) {
    for (int64_t pair = 0; pair < R / 2; pair++) {
        int64_t i = interleaved ? 2 * pair : pair, j = interleaved ? i + 1 : pair + R / 2;
        float a = head[i], b = head[j];
        head[i] = a * cos[i] - b * sin[i];
        head[j] = b * cos[j] + a * sin[j];
    }
}

/* The exponential of a number near 0, or of a vector of such. */
#define SERIES(x)                                                                                          \
    ((((((x * (1.0f / 720) + 1.0f / 120) * x + 1.0f / 24) * x + 1.0f / 6) * x + 0.5f) * x + 1.0f) * x + 1.0f)

/* e to the power of x within 3e-7 of it, in steps that a compiler takes for several numbers at once. */
static inline float exponential(float x) {
    float near = x < 88.72f ? x : 88.72f;
    near = near > -86.6f ? near : -86.6f;
    float shifted = near * (float)M_LOG2E + 12582912.0f; /* 1.5 * 2^23: rounds to a whole number */
    float whole = shifted - 12582912.0f, rest = near - whole * 0.693359375f - whole * -2.12194440e-4f;
    union { float number; int32_t bits; } power = {shifted};
    power.bits = (int32_t)((uint32_t)power.bits << 23) + 0x3f000000; /* 2^(whole - 1), which is in range */
    float found = SERIES(rest) * power.number * 2;
    found = x < -86.6f ? 0 : found;
    found = x > 88.72f ? INFINITY : found;
    return x != x ? x : found;
}

#include "topk.h"

/* Add to z [width] the values of slots that are seen, times their weights; sums stay in registers. */
#define MIX(C)                                                                                             \
    for (; e + C * LANES <= width; e += C * LANES) {                                                       \
        Vector sums[C];                                                                                    \
        EACH(c, C) sums[c] = load(z + e + c * LANES);                                                      \
        for (int64_t s = 0; s < slots; s++) {                                                              \
            if (mask && !mask[s * mask_slot]) continue;                                                    \
            EACH(c, C) sums[c] += weights[s] * load(values + s * step + e + c * LANES);                    \
        }                                                                                                  \
        EACH(c, C) *(Vector *)(z + e + c * LANES) = sums[c];                                               \
    }
static void mix(const float *values, int64_t step, const float *weights, const uint8_t *mask,
                int64_t mask_slot, int64_t slots, int64_t width, float *z) {
    int64_t e = 0;
    MIX(4)
    MIX(1)
    for (; e < width; e++)
        for (int64_t s = 0; s < slots; s++)
            if (!mask || mask[s * mask_slot]) z[e] += weights[s] * values[s * step + e];
}

/* The answer of one query to the slots of its key/value head; zeros where it may see none. */
static void attend(const Attention *attention, const View *view, int64_t b, int64_t head, const float *q,
                   float *scores, float *z) {
    int64_t row = b / view->shared_by, kv = head / (attention->heads / attention->kv_heads);
    const float *keys = view->keys + row * view->key_row + kv * view->key_head;
    const float *values = view->values + row * view->value_row + kv * view->value_head;
    const uint8_t *mask = view->mask ? view->mask + row * view->mask_row : NULL;
    const float *bias = view->bias ? view->bias + b * view->bias_row + head * view->bias_head : NULL;
    const int64_t *table = view->table ? view->table + row * view->table_row : NULL;
    int64_t size = table ? view->block : view->slots;
    float scale = attention->scale, softcap = attention->softcap;
    float most = attention->sink ? attention->sink[head] : -INFINITY, sum = 0;
    for (int64_t start = 0; start < view->slots; start += size) {
        int64_t place = table ? table[start / size] * size : start;
        const float *key = keys + place * view->key_slot, *value = values + place * view->value_slot;
        for (int64_t s = start; s < start + size; s++, key += view->key_slot, value += view->value_slot) {
            scores[s] = -INFINITY;
            if (mask && !mask[s * view->mask_slot]) continue;
            for (int64_t e = 0; e < attention->value_width; e += 16) __builtin_prefetch(value + e);
            float score = dot(q, key, attention->width) * scale;
            if (softcap > 0) score = softcap * tanhf(score / softcap);
            if (bias) score += bias[s * view->bias_slot];
            scores[s] = score;
            if (!(score <= most)) most = score; /* also where it is no number */
        }
    }
    if (most == -INFINITY) most = 0; /* nothing is seen */
    for (int64_t s = 0; s < view->slots; s++) scores[s] = exponential(scores[s] - most);
    memset(z, 0, attention->value_width * sizeof(float));
    for (int64_t start = 0; start < view->slots; start += size) {
        const float *value = values + (table ? table[start / size] * size : start) * view->value_slot;
        const uint8_t *seen = mask ? mask + start * view->mask_slot : NULL;
        for (int64_t s = 0; s < size; s++)
            if (!seen || seen[s * view->mask_slot]) sum += scores[start + s];
        mix(value, view->value_slot, scores + start, seen, view->mask_slot, size, attention->value_width, z);
    }
    if (attention->sink) sum += expf(attention->sink[head] - most);
    for (int64_t e = 0; e < attention->value_width; e++) z[e] = sum == 0 ? 0 : z[e] / sum;
}

#define ACTIVATE(formula)                                                                                  \
    for (int64_t i = 0; i < count; i++) {                                                                  \
        float x = values[i];                                                                               \
        values[i] = formula;                                                                               \
    }                                                                                                      \
    break;

static void activate(float *values, int64_t count, int64_t activation) {
    const float slope = -2 * (float)(M_2_SQRTPI * M_SQRT1_2);
    switch (activation) { /* the order of ACTIVATIONS */
    case 0: ACTIVATE(x > 0 || x != x ? x : 0)
    case 1: ACTIVATE(0.5f * x * (1 + erff(x * (float)M_SQRT1_2)))
    case 2: ACTIVATE(x / (1 + exponential(slope * (x + 0.044715f * x * x * x))))
    case 3: ACTIVATE(x / (1 + exponential(-1.702f * x)))
    case 4: ACTIVATE(x / (1 + exponential(-x)))
    default: ACTIVATE(x > 0 || x != x ? x * x : 0)
    }
}

/* What the threads of a call share. */
typedef struct {
    const Layer *layers;
    int64_t count;
    const Norm *last;
    float *q, *k, *v, *z, *y, *gate, *up;
    float *own; /* `each` numbers for every thread by itself */
    int64_t each, slots;
} Shared;

/* `normed` [B, D] through attention, into shared y; `own`: its keys are those of the text, not the source. */
static void attention_part(const Attention *a, const Shared *s, const Layer *layer, const float *normed,
                           int64_t own, float *scores, Thread thread, Room *room) {
    const Call *call = layer->call;
    room->x = NULL; /* the same place has other numbers now */
    View there = own ? call->own : call->source, *view = &there;
    view->keys = own ? layer->keys : layer->source_keys;
    view->values = own ? layer->values : layer->source_values;
    int64_t B = call->batch, H = a->heads, K = a->kv_heads, E = a->width, V = a->value_width;
    matmul(&a->q, normed, B, s->q, H * E, call->alike, thread, room);
    if (own) {
        matmul(&a->k, normed, B, s->k, K * E, call->alike, thread, room);
        matmul(&a->v, normed, B, s->v, K * V, call->alike, thread, room);
    }
    GOMP_barrier();
    for (int64_t b = thread.number; b < B; b += thread.count) {
        const float *cos = call->cos ? call->cos + b * call->rotary_row : NULL;
        const float *sin = call->sin ? call->sin + b * call->rotary_row : NULL;
        int64_t groups = a->whole_norm ? 1 : H, width = H * E / groups;
        if (a->q_norm.kind) norm(&a->q_norm, s->q + b * H * E, s->q + b * H * E, groups, width);
        if (own && cos)
            for (int64_t h = 0; h < H; h++)
                rotate(s->q + (b * H + h) * E, cos, sin, call->rotated, a->interleaved);
        if (!own) continue;
        groups = a->whole_norm ? 1 : K, width = K * E / groups;
        if (a->k_norm.kind) norm(&a->k_norm, s->k + b * K * E, s->k + b * K * E, groups, width);
        int64_t slot = call->slots ? call->slots[b * call->slots_row] : call->slot;
        for (int64_t h = 0; h < K; h++) {
            float *key = s->k + (b * K + h) * E;
            if (cos) rotate(key, cos, sin, call->rotated, a->interleaved);
            int64_t to = b * view->key_row + h * view->key_head + slot * view->key_slot;
            memcpy(view->keys + to, key, E * sizeof(float));
            to = b * view->value_row + h * view->value_head + slot * view->value_slot;
            memcpy(view->values + to, s->v + (b * K + h) * V, V * sizeof(float));
        }
    }
    GOMP_barrier();
    for (int64_t item = thread.number; item < B * H; item += thread.count)
        attend(a, view, item / H, item % H, s->q + item * E, scores, s->z + item * V);
    GOMP_barrier();
    matmul(&a->out, s->z, B, s->y, a->out.rows, call->alike, thread, room);
    GOMP_barrier();
}

/* `normed` [B, D] through the feed-forward, into shared y. */
static void feedforward_part(const FeedForward *f, const Shared *s, const Call *call, const float *normed,
                             Thread thread, Room *room) {
    room->x = NULL;
    int64_t B = call->batch, F = f->up.rows, alike = call->alike;
    float *pre = f->gate.rows ? s->gate : s->up;
    matmul(&f->up, normed, B, s->up, F, alike, thread, room);
    if (f->gate.rows) matmul(&f->gate, normed, B, s->gate, F, alike, thread, room);
    for (int64_t b = 0; b < B; b++) {
        int64_t start = b * F + from(F, thread), stop = b * F + until(F, thread);
        activate(pre + start, stop - start, f->activation);
        for (int64_t i = start; f->gate.rows && i < stop; i++) s->up[i] *= pre[i];
    }
    GOMP_barrier();
    matmul(&f->down, s->up, B, s->y, f->down.rows, alike, thread, room);
    GOMP_barrier();
}

/* x [B, D], the stream as this thread has it, through one layer; after x there is room for the rest. */
static void layer_part(const Shared *s, const Layer *layer, float *x, Thread thread) {
    const Block *block = layer->block;
    int64_t B = layer->call->batch, D = block->width, size = B * D;
    float *normed = x + size, *y = normed + size, *other = y + size, *scores = other + size;
    Room room = {scores + s->slots, NULL, NULL, 0};

    const Residual *first = &block->attention_residual, *last = &block->feedforward_residual;
    const float *read = x;
    if (first->before.kind) norm(&first->before, x, normed, B, D), read = normed;
    attention_part(&block->attention, s, layer, read, 1, scores, thread, &room);
    memcpy(y, s->y, size * sizeof(float));
    if (block->parallel) {
        if (last->before.kind) norm(&last->before, x, other, B, D), read = other;
    } else {
        add(first, x, y, B, D);
        if (block->cross.q.rows) {
            const Residual *between = &block->cross_residual;
            read = x;
            if (between->before.kind) norm(&between->before, x, normed, B, D), read = normed;
            attention_part(&block->cross, s, layer, read, 0, scores, thread, &room);
            memcpy(y, s->y, size * sizeof(float));
            add(between, x, y, B, D);
        }
        read = x;
        if (last->before.kind) norm(&last->before, x, normed, B, D), read = normed;
    }
    feedforward_part(&block->feedforward, s, layer->call, read, thread, &room);
    if (block->parallel) add(first, x, y, B, D);
    memcpy(y, s->y, size * sizeof(float));
    add(last, x, y, B, D);
}

static void blocks_work(void *data) {
    const Shared *s = data;
    const Call *call = s->layers->call;
    Thread thread = {omp_get_thread_num(), omp_get_num_threads()};
    int64_t size = call->batch * s->layers->block->width;
    float *x = s->own + thread.number * s->each;
    memcpy(x, call->x, size * sizeof(float));
    for (int64_t i = 0; i < s->count; i++) layer_part(s, s->layers + i, x, thread);
    if (thread.number) return;
    if (s->last->kind)
        norm(s->last, x, call->out, call->batch, s->layers->block->width);
    else
        memcpy(call->out, x, size * sizeof(float));
}

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* Take one token of each row through blocks, one after the other, and the last norm; 0, or 1 where memory ran out. */
int clearhead_blocks(const Layer *layers, int64_t count, const Norm *last) {
    const Call *call = layers->call;
    int64_t sizes[7] = {0}, slots = 0, room = 0, all = 0, width = layers->block->width;
    for (int64_t i = 0; i < count; i++) {
        const Block *block = layers[i].block;
        const Attention *own = &block->attention, *cross = &block->cross;
        const FeedForward *f = &block->feedforward;
        int64_t q = larger(own->q.rows, cross->q.rows ? cross->q.rows : 0);
        int64_t z = larger(own->out.columns, cross->q.rows ? cross->out.columns : 0);
        int64_t needed[] = {q, own->k.rows, own->v.rows, z, width, f->up.rows, f->up.rows};
        for (int part = 0; part < 7; part++) sizes[part] = larger(sizes[part], needed[part]);
        slots = larger(slots, larger(layers[i].call->own.slots, layers[i].call->source.slots));
        room = larger(room, room_of(larger(larger(z, width), f->down.columns), call->batch));
    }
    slots += lines(4 * call->batch * width + slots) - (4 * call->batch * width + slots); /* the room follows */
    int64_t each = 4 * call->batch * width + slots + lines(room);
    for (int part = 0; part < 7; part++) all += sizes[part] = lines(sizes[part] * call->batch);
    float *memory = in_lines(all + call->threads * each), *next = memory;
    if (!memory) return 1;
    Shared shared = {.layers = layers, .count = count, .last = last, .own = memory + all};
    shared.each = each, shared.slots = slots;
    float **places[] = {&shared.q, &shared.k, &shared.v, &shared.z, &shared.y, &shared.gate, &shared.up};
    for (int part = 0; part < 7; next += sizes[part++]) *places[part] = next;
    GOMP_parallel(blocks_work, &shared, call->threads, 0);
    free(memory);
    return 0;
}

typedef struct {
    const Linear *linear;
    const float *x;
    float *y;
    int64_t batch, alike;
    float *memory;
} Product;

static void linear_work(void *data) {
    Product *p = data;
    const Linear *linear = p->linear;
    Thread thread = {omp_get_thread_num(), omp_get_num_threads()};
    int64_t rows = linear->rows, share = linear->codes ? p->batch : panels_of(p->batch);
    int64_t first = share * thread.number / thread.count, stop = share * (thread.number + 1) / thread.count;
    if (!linear->codes) {
        if (p->memory) {
            lay_rows(p->x, linear->columns, p->batch, first, stop, p->memory);
            GOMP_barrier();
        }
        wide_product(linear, p->x, p->memory, p->batch, p->y, rows, p->alike, thread);
        return;
    }
    Rounded rounded = rounded_in(p->memory, linear, p->batch), rest;
    Linear again = *linear; /* for the rest: it is multiplied by what smooths already */
    again.bias = again.smooth = NULL;
    if (linear->twice) {
        rounded.rest = p->memory + lines(rounded_room(linear->columns, p->batch));
        rest = rounded_in(rounded.rest + lines(p->batch * linear->columns), linear, p->batch);
    }
    round_rows(linear, p->x, first, stop, &rounded);
    if (linear->twice) round_rows(&again, rounded.rest, first, stop, &rest);
    GOMP_barrier();
    int64_t start = from(rows, thread), end = until(rows, thread);
    rounded_product(linear, &rounded, p->batch, p->y, rows, start, end);
    if (!linear->twice) return;
    float *small = (float *)rest.codes + lines(rounded_room(linear->columns, p->batch));
    rounded_product(&again, &rest, p->batch, small, rows, start, end);
    for (int64_t b = 0; b < p->batch; b++)
        for (int64_t n = start; n < end; n++) p->y[b * rows + n] += small[b * rows + n];
}

/* y [B, N] = x [B, D] Wᵀ + bias; 0, or 1 where memory ran out. */
int clearhead_linear(const Linear *linear, const float *x, float *y, int64_t batch, int64_t threads,
                     int64_t alike) {
    Product job = {linear, x, y, batch, alike, NULL};
    if (linear->codes || (pays(batch) && !alike)) {
        int64_t D = linear->columns, again = rounded_room(D, batch) + batch * (D + linear->rows);
        job.memory = in_lines(room_of(D, batch) + (linear->twice ? again + 3 * 16 : 0)); /* in whole lines */
        if (!job.memory) return 1;
    }
    GOMP_parallel(linear_work, &job, threads, 0);
    free(job.memory);
    return 0;
}

/* Whether many rows too are quicker here than with PyTorch, as measured on Arm versus OpenBLAS and Arm's Compute
Library. Where vectors are longer (SVE), or on Apple's processors, that was not seen. */
int clearhead_any_rows(void) {
#if defined(__aarch64__) && defined(__linux__) && !defined(__ARM_FEATURE_SVE)
    return 1;
#else
    return 0;
#endif
}
