/* A matrix copied so that its columns become rows: sixteen rows at a time fill whole lines of the cache, and a band of
   columns is read before the next rows are. */

#ifdef __clang__
#define PICKED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t Places __attribute__((vector_size(16)));
#define PICKED(a, b, ...) __builtin_shuffle(a, b, (Places){__VA_ARGS__})
#endif

enum { SIDE = 16, BAND = 128 };

/* Four rows of four numbers, transposed. */
static inline void transpose_four(const float *from, int64_t row, Four out[4]) {
    Four a = *(const Four *)from, b = *(const Four *)(from + row);
    Four c = *(const Four *)(from + 2 * row), d = *(const Four *)(from + 3 * row);
    Four ab = PICKED(a, b, 0, 4, 1, 5), cd = PICKED(c, d, 0, 4, 1, 5);
    out[0] = PICKED(ab, cd, 0, 1, 4, 5), out[1] = PICKED(ab, cd, 2, 3, 6, 7);
    ab = PICKED(a, b, 2, 6, 3, 7), cd = PICKED(c, d, 2, 6, 3, 7);
    out[2] = PICKED(ab, cd, 0, 1, 4, 5), out[3] = PICKED(ab, cd, 2, 3, 6, 7);
}

/* One by one: what is left at the edges. */
static void transpose_each(const float *from, int64_t from_row, int64_t rows, int64_t columns, float *to,
                      int64_t to_row) {
    for (int64_t c = 0; c < columns; c++)
        for (int64_t r = 0; r < rows; r++) to[c * to_row + r] = from[r * from_row + c];
}

/* Copy [rows, columns] to [columns, rows]; rows lie `from_row` and `to_row` numbers apart. */
void clearhead_transpose(const float *from, int64_t from_row, int64_t rows, int64_t columns, float *to,
                    int64_t to_row) {
    int64_t high = rows / SIDE * SIDE, wide = columns / SIDE * SIDE;
    for (int64_t c = 0; c < wide; c += BAND)
        for (int64_t r = 0; r < high; r += SIDE)
            for (int64_t each = c; each < c + BAND && each < wide; each += 4) {
                Four parts[SIDE / 4][4];
                EACH(i, SIDE / 4) transpose_four(from + (r + 4 * i) * from_row + each, from_row, parts[i]);
                EACH(k, 4) EACH(i, SIDE / 4)
                    *(Four *)(to + (each + k) * to_row + r + 4 * i) = parts[i][k];
            }
    transpose_each(from + wide, from_row, high, columns - wide, to + wide * to_row, to_row);
    transpose_each(from + high * from_row, from_row, rows - high, columns, to + high, to_row);
}
