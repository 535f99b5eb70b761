/* Products of many rows in float32: rows of x lie side by side, so that a vector holds a column of several.

A tile keeps its sums in registers and adds them up column by column. Every row of a batch is added up in the
same order. Rows are filled up to whole vectors with zeros.

Sizes: B rows of x, D width in. */

/* A tile: as many vectors of rows of x, and rows of the weight; of these so many go panel by panel. Tiles of
more rows are for weights that are near: from memory so many rows at once come more slowly. */
#if LANES == 4
enum { MOST_VECTORS = 2, TALL = 4, TALLER = 8, TOGETHER = 64 };
#elif LANES == 8
enum { MOST_VECTORS = 3, TALL = 4, TALLER = 4, TOGETHER = 16 };
#else
enum { MOST_VECTORS = 3, TALL = 8, TALLER = 8, TOGETHER = 16 };
#endif

static inline int64_t vectors_of(int64_t batch) { return (batch + LANES - 1) / LANES; }

/* Whether a batch is worth laying side by side: two vectors at least, of which little is filled up. */
static inline int64_t pays(int64_t batch) {
    return batch >= 2 * LANES && vectors_of(batch) * LANES - batch <= batch / 8;
}

/* Numbers of float32 that rows laid side by side take. */
static int64_t panel_room(int64_t columns, int64_t batch) {
    return pays(batch) ? vectors_of(batch) * LANES * columns : 0;
}

/* Panels of nearly one size share the vectors of a batch; panel `number` begins at this one. */
static inline int64_t panels_of(int64_t batch) {
    return (vectors_of(batch) + MOST_VECTORS - 1) / MOST_VECTORS;
}
static inline int64_t panel_from(int64_t batch, int64_t number) {
    return vectors_of(batch) * number / panels_of(batch);
}

/* Lay rows of x [B, D] side by side, those of the panels from `first` until `stop`. */
static void lay_rows(const float *x, int64_t D, int64_t batch, int64_t first, int64_t stop, float *to) {
    for (int64_t number = first; number < stop; number++) {
        int64_t start = panel_from(batch, number) * LANES, end = panel_from(batch, number + 1) * LANES;
        int64_t width = end - start, filled = end < batch ? width : batch - start;
        float *panel = to + start * D;
        int64_t turned = filled == width ? D / 4 * 4 : 0;
        for (int64_t d = 0; d < turned; d += 4)
            for (int64_t b = 0; b < width; b += 4) {
                Four parts[4];
                transpose_four(x + (start + b) * D + d, D, parts);
                EACH(k, 4) *(Four *)(panel + (d + k) * width + b) = parts[k];
            }
        for (int64_t d = turned; d < D; d++) {
            for (int64_t b = 0; b < filled; b++) panel[d * width + b] = x[(start + b) * D + d];
            for (int64_t b = filled; b < width; b++) panel[d * width + b] = 0;
        }
    }
}

/* Some processors multiply by a part of a register, others by a number that they spread as they read it. */
#if LANES == 4
typedef Four Weights;
#define WEIGHTS(at) (*(const Four *)(at))
#else
typedef const float *Weights;
#define WEIGHTS(at) (at)
#endif

/* Add up four columns at a time, R rows of a weight with C vectors of x. Where registers suffice, what comes
next is read while this is multiplied, in the order written here, which the compiler would undo. */
#if LANES == 4
#if defined(__GNUC__) && !defined(__clang__)
#define AS_WRITTEN __attribute__((optimize("no-schedule-insns")))
#endif
#define BY_FOUR(R, C, first)                                                                               \
    Weights weights[R];                                                                                    \
    Vector xs[4][C];                                                                                       \
    if (D >= 4) {                                                                                          \
        EACH(r, R) weights[r] = WEIGHTS(w + r * D);                                                        \
        EACH(i, 3) EACH(c, C) xs[i][c] = load(x + (i * C + c) * LANES);                                    \
    }                                                                                                      \
    for (; d + 8 <= D; d += 4) {                                                                           \
        if (first) FETCH(R, w, 1, d, D)                                                                    \
        EACH(i, 4) EACH(r, R) {                                                                            \
            EACH(c, C) sums[r][c] += xs[i][c] * weights[r][i];                                             \
            if (i == 3) weights[r] = WEIGHTS(w + r * D + d + 4);                                           \
            if (r == 2) EACH(c, C) xs[(i + 3) % 4][c] = load(x + ((d + i + 3) * C + c) * LANES);           \
        }                                                                                                  \
    }                                                                                                      \
    if (D >= 4) {                                                                                          \
        EACH(c, C) xs[3][c] = load(x + ((d + 3) * C + c) * LANES);                                         \
        EACH(i, 4) EACH(r, R) EACH(c, C) sums[r][c] += xs[i][c] * weights[r][i];                           \
        d += 4;                                                                                            \
    }
#else
#define BY_FOUR(R, C, first)                                                                               \
    for (; d + 4 <= D; d += 4) {                                                                           \
        if (first) FETCH(R, w, 1, d, D)                                                                    \
        Weights weights[R];                                                                                \
        EACH(r, R) weights[r] = WEIGHTS(w + r * D + d);                                                    \
        EACH(i, 4) {                                                                                       \
            Vector xs[C];                                                                                  \
            EACH(c, C) xs[c] = load(x + ((d + i) * C + c) * LANES);                                        \
            EACH(r, R) EACH(c, C) sums[r][c] += xs[c] * weights[r][i];                                     \
        }                                                                                                  \
    }
#endif
#ifndef AS_WRITTEN
#define AS_WRITTEN
#endif

/* R rows of a weight with `count` rows of x that lie side by side in C vectors. The `first` panel of a batch
brings the rows near, the others find them there. */
#define PANEL(R, C, name, first)                                                                           \
    AS_WRITTEN static void name(const float *w, const float *x, int64_t D, float *y, int64_t stride,       \
                                const float *bias, int64_t count) {                                        \
        Vector sums[R][C];                                                                                 \
        EACH(r, R) EACH(c, C) sums[r][c] = (Vector){0};                                                    \
        int64_t d = 0;                                                                                     \
        BY_FOUR(R, C, first)                                                                               \
        for (; d < D; d++)                                                                                 \
            EACH(r, R) EACH(c, C) sums[r][c] += load(x + (d * C + c) * LANES) * w[r * D + d];              \
        float rows[R][C * LANES];                                                                          \
        EACH(r, R) EACH(c, C) *(Vector *)(rows[r] + c * LANES) = sums[r][c] + bias[r];                     \
        for (int64_t b = 0; b < count; b++) EACH(r, R) y[b * stride + r] = rows[r][b];                     \
    }
typedef void Panel(const float *, const float *, int64_t, float *, int64_t, const float *, int64_t);
PANEL(TALL, 1, first_1, 1)
PANEL(TALL, 2, first_2, 1)
PANEL(TALL, 3, first_3, 1)
PANEL(TALL, 1, panel_1, 0)
PANEL(TALL, 2, panel_2, 0)
PANEL(TALL, 3, panel_3, 0)
PANEL(TALLER, 1, taller_1, 0)
PANEL(TALLER, 2, taller_2, 0)
PANEL(TALLER, 3, taller_3, 0)

/* Rows of a weight, a multiple of TALL, with all rows of x, side by side. A panel stays near meanwhile. */
static void panels(const float *w, int64_t rows, const float *laid, int64_t D, int64_t batch, float *y,
                   int64_t stride, const float *bias) {
    static const float none[TALLER] = {0};
    static Panel *const first_panel[] = {first_1, first_2, first_3};
    static Panel *const others[] = {panel_1, panel_2, panel_3};
    static Panel *const taller[] = {taller_1, taller_2, taller_3};
    for (int64_t number = 0; number < panels_of(batch); number++) {
        int64_t first = panel_from(batch, number), count = panel_from(batch, number + 1) - first;
        int64_t start = first * LANES, left = batch - start;
        int64_t filled = left < count * LANES ? left : count * LANES;
        for (int64_t n = 0, height; n < rows; n += height) {
            height = number && n + TALLER <= rows ? TALLER : TALL;
            Panel *panel = (!number ? first_panel : height == TALL ? others : taller)[count - 1];
            panel(w + n * D, laid + start * D, D, y + start * stride + n, stride, bias ? bias + n : none,
                  filled);
        }
    }
}
