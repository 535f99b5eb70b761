/* The best tokens of each row: their logits less the logarithm of the sum of all exponentials. Nothing as
large as the logits is written. */

enum { PIECE = 4 * LANES }; /* numbers looked at together */
typedef int32_t Whole __attribute__((vector_size(4 * LANES)));

typedef struct {
    const float *all, *kept; /* [rows, width]: the sum is of `all`, the best are of `kept` */
    int64_t rows, width, count;
    float *values; /* [rows, count], best first */
    int64_t *indices; /* where less than `count` are above -inf: 0, with -inf */
} Best;

/* a where the mask is set, b elsewhere. */
static inline Vector chosen(Whole mask, Vector a, Vector b) {
    return (Vector)(((Whole)a & mask) | ((Whole)b & ~mask));
}
static inline Vector larger_of(Vector a, Vector b) { return chosen(a > b, a, b); }

/* The largest of `count` numbers, at most PIECE; one that is no number is passed over. */
static inline float largest(const float *x, int64_t count) {
    float most = -INFINITY;
    if (count < PIECE) {
        for (int64_t d = 0; d < count; d++) most = x[d] > most ? x[d] : most;
        return most;
    }
    union { Vector all; float each[LANES]; } found;
    Vector first = larger_of(load(x), load(x + LANES));
    Vector second = larger_of(load(x + 2 * LANES), load(x + 3 * LANES));
    found.all = larger_of(first, second);
    for (int i = 0; i < LANES; i++) most = found.each[i] > most ? found.each[i] : most;
    return most;
}

/* `exponential` of numbers that are not above 0, a vector of them: those below -86.6 give next to nothing. */
static inline Vector powers(Vector x) {
    const Vector least = (Vector){0} - 86.6f;
    Vector near = chosen(x < least, least, x);
    Vector shifted = near * (float)M_LOG2E + 12582912.0f, whole = shifted - 12582912.0f;
    Vector rest = near - whole * 0.693359375f - whole * -2.12194440e-4f;
    return SERIES(rest) * (Vector)(((Whole)shifted << 23) + 0x3f800000);
}

/* The logarithm of the sum of exponentials of numbers less the largest; no number where one is none. */
static float log_of_sum(const float *x, int64_t count, float most) {
    Vector sums[4];
    EACH(i, 4) sums[i] = (Vector){0};
    const Vector top = (Vector){0} + most;
    int64_t d = 0;
    for (; d + PIECE <= count; d += PIECE)
        EACH(i, 4) sums[i] += powers(load(x + d + i * LANES) - top);
    double all = total((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; d < count; d++) all += exponential(x[d] - most);
    return (float)log(all);
}

/* Put a number in its index among the best; of equal ones the first stays before. */
static void insert(float *values, int64_t *indices, int64_t count, float value, int64_t index) {
    int64_t at = count - 1;
    for (; at > 0 && value > values[at - 1]; at--) values[at] = values[at - 1], indices[at] = indices[at - 1];
    values[at] = value, indices[at] = index;
}

static void best_work(void *data) {
    const Best *best = data;
    int64_t width = best->width, count = best->count;
    for (int64_t row = omp_get_thread_num(); row < best->rows; row += omp_get_num_threads()) {
        const float *kept = best->kept + row * width;
        float *values = best->values + row * count;
        int64_t *indices = best->indices + row * count;
        for (int64_t i = 0; i < count; i++) values[i] = -INFINITY, indices[i] = 0;
        float most = -INFINITY;
        for (int64_t start = 0; start < width; start += PIECE) {
            int64_t stop = width - start < PIECE ? width : start + PIECE;
            float here = largest(kept + start, stop - start);
            if (!(here > values[count - 1])) continue;
            for (int64_t d = start; d < stop; d++)
                if (kept[d] > values[count - 1]) insert(values, indices, count, kept[d], d);
        }
        if (best->all == best->kept) most = values[0];
        else
            for (int64_t d = 0; d < width; d += PIECE) {
                float here = largest(best->all + row * width + d, width - d < PIECE ? width - d : PIECE);
                most = here > most ? here : most;
            }
        float sum = log_of_sum(best->all + row * width, width, most);
        for (int64_t i = 0; i < count; i++) values[i] = (values[i] - most) - sum;
    }
}

void clearhead_best(const Best *best, int64_t threads) {
    GOMP_parallel(best_work, (void *)best, threads, 0);
}
