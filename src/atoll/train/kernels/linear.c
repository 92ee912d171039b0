#include "chain.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define FEW 5 /* samples of a narrow layer that are taken together */
#define DOT 16 /* so many groups of 16 columns make one sum, whatever the processor has */

/* Sums += value * row for the entries of one sample whose rows lie before `end`; return where they end. */
#define ADD_ROWS(NV)                                                                                     \
  INLINE int32_t add_rows_##NV(float *sums, const Entry *entry, int32_t place, int32_t num, int32_t end, \
                               const float *weight, int64_t wide) {                                      \
    Vector acc[NV];                                                                                         \
    UNROLL for (int v = 0; v < NV; v++) acc[v] = load(sums + v * WIDTH);               \
    for (; place < num && entry[place].at < end; place++) {                                              \
      const float *row = weight + entry[place].at * wide;                                                \
      const float value = entry[place].value;                                                            \
      UNROLL for (int v = 0; v < NV; v++) acc[v] += value * load(row + v * WIDTH);     \
    }                                                                                                    \
    UNROLL for (int v = 0; v < NV; v++) store(sums + v * WIDTH, acc[v]);               \
    return place;                                                                                        \
  }

/* Move rows by value * slope of the samples that had a value there. */
#define MOVE_ROWS(NV)                                                                                         \
  INLINE void move_rows_##NV(float *weight, const Entry *by_column, const int32_t *num_by_column, int64_t start, \
                             int64_t end, int64_t num, const float *slope, int64_t wide) {                    \
    for (int64_t k = start; k < end; k++) {                                                                   \
      if (!num_by_column[k]) continue;                                                                        \
      const Entry *entry = by_column + k * num, *last = entry + num_by_column[k];                             \
      float *row = weight + k * wide;                                                                         \
      Vector acc[NV];                                                                                         \
      UNROLL for (int v = 0; v < NV; v++) acc[v] = load(row + v * WIDTH);                                     \
      for (; entry < last; entry++) {                                                                         \
        const float *other = slope + entry->at * wide;                                                        \
        const float value = entry->value;                                                                     \
        UNROLL for (int v = 0; v < NV; v++) acc[v] += value * load(other + v * WIDTH);                        \
      }                                                                                                       \
      UNROLL for (int v = 0; v < NV; v++) store(row + v * WIDTH, acc[v]);                                     \
    }                                                                                                         \
  }

/* Slopes of one sample's inputs: += row . slope over `groups` of 16 columns, for the rows that lie before `end`. */
#define DOT_ROWS(NV)                                                                                             \
  INLINE int32_t dot_rows_##NV(float *found, const Entry *entry, int32_t place, int32_t num, int32_t end,         \
                               const float *weight, int64_t wide, const float *slope) {                          \
    Vector fixed[NV][LANES / WIDTH];                                                                             \
    UNROLL for (int v = 0; v < NV; v++) {                                                                        \
      UNROLL for (int i = 0; i < LANES / WIDTH; i++) fixed[v][i] = load(slope + v * LANES + i * WIDTH);           \
    }                                                                                                            \
    for (; place < num && entry[place].at < end; place++) {                                                      \
      const float *row = weight + entry[place].at * wide;                                                        \
      Vector acc[LANES / WIDTH];                                                                                 \
      UNROLL for (int i = 0; i < LANES / WIDTH; i++) acc[i] = (Vector){0};                                       \
      UNROLL for (int v = 0; v < NV; v++) {                                                                      \
        UNROLL for (int i = 0; i < LANES / WIDTH; i++) acc[i] += fixed[v][i] * load(row + v * LANES + i * WIDTH); \
      }                                                                                                          \
      found[entry[place].at] += total(acc);                                                                      \
    }                                                                                                            \
    return place;                                                                                                \
  }

ALL(ADD_ROWS) ALL(MOVE_ROWS) EACH_16(DOT_ROWS)

static int32_t add_rows(int nv, float *sums, const Entry *entry, int32_t place, int32_t num, int32_t end,
                        const float *weight, int64_t wide) {
#define ONE(NV) case NV: return add_rows_##NV(sums, entry, place, num, end, weight, wide);
  switch (nv) { ALL(ONE) }
#undef ONE
  return num;
}

static void move_rows(int nv, float *weight, const Room *room, int64_t start, int64_t end, int64_t num,
                      const float *slope, int64_t wide) {
  const Entry *by_column = room->by_column;
  const int32_t *nums = room->num_by_column;
#define ONE(NV) case NV: move_rows_##NV(weight, by_column, nums, start, end, num, slope, wide); return;
  switch (nv) { ALL(ONE) }
#undef ONE
}

static int32_t dot_rows(int nv, float *found, const Entry *entry, int32_t place, int32_t num, int32_t end,
                        const float *weight, int64_t wide, const float *slope) {
#define ONE(NV) case NV: return dot_rows_##NV(found, entry, place, num, end, weight, wide, slope);
  switch (nv) { EACH_16(ONE) }
#undef ONE
  return num;
}

/* How many rows stay in the nearest cache while all samples use them. */
static int64_t rows_at_once(const Layer *layer) {
  int64_t rows = 4096 / layer->wide;
  return rows < 4 ? 4 : rows;
}

static int vectors(const Layer *layer, int64_t first) {
  int64_t left = (layer->wide - first) / WIDTH;
  return (int)(left < WIDEST ? left : WIDEST);
}

#if defined(__AVX512F__)
/* List what is not zero of eight numbers that begin at column k; the places behind it are overwritten. */
INLINE int32_t list_eight(Entry *entry, __m256 value, int64_t k) {
  const __mmask8 which = _mm256_cmp_ps_mask(value, _mm256_setzero_ps(), _CMP_NEQ_UQ);
  const __m512i ats = _mm512_add_epi64(_mm512_set1_epi64(k), _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0));
  const __m512i values = _mm512_slli_epi64(_mm512_cvtepu32_epi64(_mm256_castps_si256(value)), 32);
  _mm512_storeu_si512(entry, _mm512_maskz_compress_epi64(which, _mm512_or_si512(ats, values)));
  return __builtin_popcount(which);
}
#define LISTED_EIGHT(FLOATS)                                                                               \
  const __m256 scales = _mm256_set1_ps(scale), shifts = _mm256_set1_ps(shift);                             \
  for (; k + 8 <= num; k += 8) found += list_eight(entry + found, _mm256_fmadd_ps(FLOATS, scales, shifts), k);
#else
#define LISTED_EIGHT(FLOATS)
#endif

/* List what is not zero of scale * number + shift; return how many there are. */
int32_t list_floats(Entry *entry, const float *from, int64_t num, float scale, float shift) {
  int32_t found = 0;
  int64_t k = 0;
  LISTED_EIGHT(_mm256_loadu_ps(from + k))
  for (; k < num; k++) {
    const float value = from[k] * scale + shift;
    entry[found].at = (int32_t)k;
    entry[found].value = value;
    found += value != 0;
  }
  return found;
}

int32_t list_bytes(Entry *entry, const uint8_t *from, int64_t num, float scale, float shift) {
  int32_t found = 0;
  int64_t k = 0;
  LISTED_EIGHT(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(from + k)))))
  for (; k < num; k += 8) {
    const int64_t end = k + 8 < num ? k + 8 : num;
    uint64_t eight = 1;
    if (shift == 0 && end == k + 8) memcpy(&eight, from + k, 8);
    if (!eight) continue; /* most of a drawing is empty */
    for (int64_t i = k; i < end; i++) {
      const float value = (float)from[i] * scale + shift;
      entry[found].at = (int32_t)i;
      entry[found].value = value;
      found += value != 0;
    }
  }
  return found;
}

/* List by column what is listed by row. */
static void list_columns(const Layer *layer, const Room *room, int64_t num) {
  memset(room->num_by_column, 0, sizeof(int32_t) * (size_t)layer->rows);
  for (int64_t b = 0; b < num; b++) {
    const Entry *entry = room->by_row + b * layer->rows;
    for (int32_t i = 0; i < room->num_by_row[b]; i++) {
      int32_t k = entry[i].at;
      Entry *column = room->by_column + k * num + room->num_by_column[k]++;
      column->at = (int32_t)b;
      column->value = entry[i].value;
    }
  }
}

/* A layer of few outputs: a row of weights takes less time than to find out who needs it. */
static int is_narrow(const Layer *layer) { return layer->wide == LANES; }

/* Sums += value * row of one entry. */
INLINE void add_entry(Vector *sums, Entry entry, const float *weight) {
  UNROLL for (int v = 0; v < LANES / WIDTH; v++) sums[v] += entry.value * load(weight + entry.at * LANES + v * WIDTH);
}

/* The same for the entries of some samples at once, since each sum waits for the one before. */
INLINE void add_narrow(int together, float *sums, const Entry *entry, int64_t rows, const int32_t *nums,
                       const float *weight) {
  Vector acc[FEW][LANES / WIDTH];
  int32_t least = nums[0];
  for (int b = 1; b < together; b++) least = nums[b] < least ? nums[b] : least;
  UNROLL for (int b = 0; b < together; b++) {
    UNROLL for (int v = 0; v < LANES / WIDTH; v++) acc[b][v] = load(sums + b * LANES + v * WIDTH);
  }
  for (int32_t i = 0; i < least; i++) {
    UNROLL for (int b = 0; b < together; b++) add_entry(acc[b], entry[b * rows + i], weight);
  }
  for (int b = 0; b < together; b++) {
    for (int32_t i = least; i < nums[b]; i++) add_entry(acc[b], entry[b * rows + i], weight);
    UNROLL for (int v = 0; v < LANES / WIDTH; v++) store(sums + b * LANES + v * WIDTH, acc[b][v]);
  }
}

/* Move rows by value * slope, sample after sample, as `move_rows` does for each row. */
static void move_narrow(float *weight, const Entry *entry, int32_t num, const float *slope) {
  Vector fixed[LANES / WIDTH];
  UNROLL for (int v = 0; v < LANES / WIDTH; v++) fixed[v] = load(slope + v * WIDTH);
  for (const Entry *last = entry + num; entry < last; entry++) {
    float *row = weight + entry->at * LANES;
    UNROLL for (int v = 0; v < LANES / WIDTH; v++)
      store(row + v * WIDTH, load(row + v * WIDTH) + entry->value * fixed[v]);
  }
}

void linear_forward(const Layer *layer, const Room *room, const float *weight, const float *bias, int64_t num) {
  const int64_t rows = layer->rows, wide = layer->wide, block = rows_at_once(layer);
  for (int64_t b = 0; b < num; b++) memcpy(room->outputs + b * wide, bias, sizeof(float) * (size_t)wide);
  if (is_narrow(layer)) {
    int64_t b = 0;
    for (; b + FEW <= num; b += FEW)
      add_narrow(FEW, room->outputs + b * LANES, room->by_row + b * rows, rows, room->num_by_row + b, weight);
    for (; b < num; b++)
      add_narrow(1, room->outputs + b * LANES, room->by_row + b * rows, rows, room->num_by_row + b, weight);
    return;
  }
  for (int64_t first = 0; first < wide; first += WIDEST * WIDTH) {
    const int nv = vectors(layer, first);
    memset(room->place, 0, sizeof(int32_t) * (size_t)num);
    for (int64_t start = 0; start < rows; start += block) {
      for (int64_t b = 0; b < num; b++)
        room->place[b] = add_rows(nv, room->outputs + b * wide + first, room->by_row + b * rows, room->place[b],
                                  room->num_by_row[b], (int32_t)(start + block), weight + first, wide);
    }
  }
}

/* Give the slopes by the inputs that are not zero, and move the weights. */
void linear_backward(const Layer *layer, const Room *room, float *weight, float *bias, const float *slope_BN, int first,
                     const Step *step, int64_t num) {
  const int64_t rows = layer->rows, wide = layer->wide, block = rows_at_once(layer);
  float *row_gradient = room->gradient, *scaled = room->gradient + wide;
  const float factor = step->plain ? -step->lr : 1;
  const int scatter = is_narrow(layer) && step->plain;
  if (!scatter) list_columns(layer, room, num);
  if (!first) memset(room->slope, 0, sizeof(float) * (size_t)(num * rows));
  for (int64_t i = 0; i < num * wide; i++) scaled[i] = factor * slope_BN[i];
  memset(room->place, 0, sizeof(int32_t) * (size_t)num);
  for (int64_t start = 0; start < rows; start += block) {
    const int64_t end = start + block < rows ? start + block : rows;
    for (int64_t b = 0; !first && b < num; b++) {
      int32_t place = room->place[b], next = place;
      for (int64_t at = 0; at < wide; at += DOT * LANES)
        next = dot_rows((int)(wide - at < DOT * LANES ? (wide - at) / LANES : DOT), room->slope + b * rows, room->by_row + b * rows, place, room->num_by_row[b],
                        (int32_t)end, weight + at, wide, slope_BN + b * wide + at);
      room->place[b] = next;
    }
    for (int64_t at = 0; step->plain && !scatter && at < wide; at += WIDEST * WIDTH)
      move_rows(vectors(layer, at), weight + at, room, start, end, num, scaled + at, wide);
    for (int64_t k = start; !step->plain && k < end; k++) {
      memset(row_gradient, 0, sizeof(float) * (size_t)wide);
      for (int64_t at = 0; at < wide; at += WIDEST * WIDTH)
        move_rows(vectors(layer, at), row_gradient + at - k * wide, room, k, k + 1, num, scaled + at, wide);
      take_step(weight + k * wide, row_gradient, layer->packed_at + k * wide, wide, step);
    }
  }
  for (int64_t b = 0; scatter && b < num; b++)
    move_narrow(weight, room->by_row + b * rows, room->num_by_row[b], scaled + b * wide);
  if (layer->bias_at < 0) return;
  memset(room->bias_gradient, 0, sizeof(float) * (size_t)wide);
  for (int64_t b = 0; b < num; b++)
    for (int64_t n = 0; n < wide; n++) room->bias_gradient[n] += slope_BN[b * wide + n];
  take_step(bias, room->bias_gradient, layer->packed_bias_at, wide, step);
}
