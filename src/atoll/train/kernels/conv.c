#include "chain.h"

/* Images lie rows, columns, channels, with their border, so that for one row of a kernel what it covers is contiguous:
   L = kernel_w * channels numbers. Weights lie (out_c, kernel_h, Lp); `forward` holds them the other way round. */

INLINE float *output_at(const Layer *layer, const Layer *next, float *output, int64_t b, int64_t y, int64_t x) {
  const int64_t border = next->is_conv ? next->pad : 0, row = (next->is_conv ? next->width : layer->out_w);
  return output + b * next->sample + ((y + border) * row + x + border) * UP16(layer->out_c);
}

void conv_prepare(const Layer *layer, const Room *room, const float *weight) {
  const int64_t length = layer->kernel_w * layer->channels, wide = UP16(layer->out_c);
  for (int64_t kh = 0; kh < layer->kernel_h; kh++)
    for (int64_t first = 0; first < layer->out_c; first += LANES) {
      const int64_t last = first + LANES < layer->out_c ? first + LANES : layer->out_c;
      for (int64_t k = 0; k < length; k++) {
        float *to = room->forward + (kh * length + k) * wide;
        for (int64_t c = first; c < last; c++) to[c] = weight[(c * layer->kernel_h + kh) * layer->wide + k];
      }
    }
}

/* Some pixels of a row, by some vectors of channels. */
#define TILE(M, NV)                                                                                             \
  INLINE void tile_##M##_##NV(const Layer *layer, const float *image, const float *weight, const float *bias,   \
                              float *output) {                                                                  \
    const int64_t length = layer->kernel_w * layer->channels, wide = UP16(layer->out_c);                        \
    const int64_t apart = layer->stride * layer->channels, row = layer->width * layer->channels;                \
    Vector acc[M][NV];                                                                                             \
    UNROLL for (int m = 0; m < M; m++)                                                         \
      UNROLL for (int v = 0; v < NV; v++) acc[m][v] = load(bias + v * WIDTH);                  \
    for (int64_t kh = 0; kh < layer->kernel_h; kh++) {                                                          \
      const float *from = image + kh * row;                                                                     \
      for (int64_t k = 0; k < length; k++, weight += wide) {                                                    \
        Vector by[NV];                                                                                             \
        UNROLL for (int v = 0; v < NV; v++) by[v] = load(weight + v * WIDTH);                  \
        UNROLL for (int m = 0; m < M; m++) {                                                   \
          const float value = from[m * apart + k];                                                              \
          UNROLL for (int v = 0; v < NV; v++) acc[m][v] += value * by[v];                      \
        }                                                                                                       \
      }                                                                                                         \
    }                                                                                                           \
    UNROLL for (int m = 0; m < M; m++)                                                         \
      UNROLL for (int v = 0; v < NV; v++) store(output + m * wide + v * WIDTH, acc[m][v]);     \
  }

#define EACH_PIXELS(NV) TILE(1, NV) TILE(2, NV) TILE(3, NV) TILE(4, NV) TILE(5, NV) TILE(6, NV)
EACH_PIXELS(1) EACH_PIXELS(2)
#if TILE_VECTORS == 4
EACH_PIXELS(4)
#endif

static void tile(int m, int nv, const Layer *layer, const float *image, const float *weight, const float *bias,
                 float *output) {
#define ONE(M, NV) case M * 8 + NV: tile_##M##_##NV(layer, image, weight, bias, output); return;
#define ONES(NV) ONE(1, NV) ONE(2, NV) ONE(3, NV) ONE(4, NV) ONE(5, NV) ONE(6, NV)
  switch (m * 8 + nv) {
    ONES(1) ONES(2)
#if TILE_VECTORS == 4
    ONES(4)
#endif
  }
#undef ONES
#undef ONE
}

/* ReLU and pooling of one image: the first of the largest of each window counts, and NaN is passed on. */
static void finish_image(const Layer *layer, const Room *room, const Layer *next, float *output, int64_t b) {
  const int64_t wide = UP16(layer->out_c), pool = layer->pool;
  for (int64_t y = 0; y < layer->out_h; y++)
    for (int64_t x = 0; x < layer->out_w; x++) {
      float *to = output_at(layer, next, output, b, y, x);
      uint8_t *picked = room->picked + ((b * layer->out_h + y) * layer->out_w + x) * wide;
      const float *from = room->outputs + (y * pool * layer->conv_w + x * pool) * wide;
      for (int64_t first = 0; first < wide; first += WIDTH) {
        Vector best = load(from + first);
        Mask which = {0}, number = {0};
        for (int64_t i = 0; i < pool; i++)
          for (int64_t j = 0; j < pool; j++, number += 1) {
            const Vector value = load(from + (i * layer->conv_w + j) * wide + first);
            const Mask better = (value > best) | (value != value);
            best = choose(better, value, best);
            which = (better & number) | (~better & which);
          }
        store(to + first, choose(best <= 0, (Vector){0}, best));
        for (int c = 0; c < WIDTH; c++) picked[first + c] = (uint8_t)which[c];
      }
    }
}

void conv_forward(const Layer *layer, const Room *room, const float *bias, const Layer *next, float *output,
                  int64_t num) {
  const int64_t wide = UP16(layer->out_c);
  for (int64_t b = 0; b < num; b++) {
    const float *image = room->input + b * layer->sample;
    for (int64_t first = 0, nv; first < wide; first += nv * WIDTH) {
      nv = (wide - first) / WIDTH;
      nv = nv >= TILE_VECTORS ? TILE_VECTORS : nv >= 2 ? 2 : 1;
      for (int64_t y = 0; y < layer->conv_h; y++)
        for (int64_t x = 0; x < layer->conv_w; x += TILE_PIXELS) {
          const int64_t left = layer->conv_w - x;
          tile((int)(left < TILE_PIXELS ? left : TILE_PIXELS), (int)nv, layer,
               image + (y * layer->width + x) * layer->stride * layer->channels, room->forward + first, bias + first,
               room->outputs + (y * layer->conv_w + x) * wide + first);
        }
    }
    finish_image(layer, room, next, output, b);
  }
}

/* Sums += value * what lies at the entries' places. */
#define GATHER(NV)                                                                                       \
  INLINE void gather_##NV(float *sums, const Entry *entry, int32_t num, const float *from, int64_t by) { \
    Vector acc[NV];                                                                                         \
    UNROLL for (int v = 0; v < NV; v++) acc[v] = load(sums + v * WIDTH);               \
    for (int32_t i = 0; i < num; i++) {                                                                  \
      const float *other = from + entry[i].at * by;                                                      \
      const float value = entry[i].value;                                                                \
      UNROLL for (int v = 0; v < NV; v++) acc[v] += value * load(other + v * WIDTH);   \
    }                                                                                                    \
    UNROLL for (int v = 0; v < NV; v++) store(sums + v * WIDTH, acc[v]);               \
  }
ALL(GATHER)

static void gather(int64_t length, float *sums, const Entry *entry, int32_t num, const float *from, int64_t by) {
  for (int64_t at = 0; at < length; at += WIDEST * WIDTH) {
    const int64_t left = (length - at + WIDTH - 1) / WIDTH;
    switch (left < WIDEST ? left : WIDEST) {
#define ONE(NV) case NV: gather_##NV(sums + at, entry, num, from + at, by); break;
      ALL(ONE)
#undef ONE
    }
  }
}

/* List the places of an image where the loss has a slope by a convolution's outputs: for each channel the places, and
   for each place the channels. `by_row` says where in the input a place begins. */
static void list_slopes(const Layer *layer, const Room *room, const Layer *next, const float *output,
                        const float *slope, int64_t b) {
  const int64_t wide = UP16(layer->out_c), pool = layer->pool, places = layer->out_h * layer->out_w;
  memset(room->num_by_row, 0, sizeof(int32_t) * (size_t)layer->out_c);
  memset(room->num_by_column, 0, sizeof(int32_t) * (size_t)(layer->conv_h * layer->conv_w));
  for (int64_t y = 0; y < layer->out_h; y++)
    for (int64_t x = 0; x < layer->out_w; x++) {
      const float *value = output_at(layer, next, (float *)output, b, y, x);
      const float *by = output_at(layer, next, (float *)slope, b, y, x);
      const uint8_t *picked = room->picked + ((b * layer->out_h + y) * layer->out_w + x) * wide;
      for (int64_t c = 0; c < layer->out_c; c++) {
        if (value[c] == 0) continue;
        const int64_t py = y * pool + picked[c] / pool, px = x * pool + picked[c] % pool, at = py * layer->conv_w + px;
        Entry *row = room->by_row + c * places + room->num_by_row[c]++;
        row->at = (int32_t)((py * layer->width + px) * layer->stride);
        row->value = by[c];
        Entry *column = room->by_column + at * layer->out_c + room->num_by_column[at]++;
        column->at = (int32_t)c;
        column->value = by[c];
        room->bias_gradient[c] += by[c];
      }
    }
}

void conv_backward(const Layer *layer, const Room *room, float *weight, float *bias, const Layer *next,
                   const float *output, const float *slope, int first, const Step *step, int64_t num) {
  const int64_t length = layer->kernel_w * layer->channels, kernel_h = layer->kernel_h, wide = layer->wide;
  const int64_t places = layer->out_h * layer->out_w, row = layer->width * layer->channels;
  memset(room->gradient, 0, sizeof(float) * (size_t)(layer->rows * wide));
  memset(room->bias_gradient, 0, sizeof(float) * (size_t)UP16(layer->out_c));
  if (!first) memset(room->slope, 0, sizeof(float) * (size_t)(num * layer->sample));
  for (int64_t b = 0; b < num; b++) {
    const float *image = room->input + b * layer->sample;
    list_slopes(layer, room, next, output, slope, b);
    for (int64_t c = 0; c < layer->out_c; c++) {
      if (!room->num_by_row[c]) continue;
      for (int64_t kh = 0; kh < kernel_h; kh++)
        gather(length, room->gradient + (c * kernel_h + kh) * wide, room->by_row + c * places, room->num_by_row[c],
               image + kh * row, layer->channels);
    }
    for (int64_t kh = 0; !first && kh < kernel_h; kh++)
      for (int64_t y = 0; y < layer->conv_h; y++)
        for (int64_t x = 0; x < layer->conv_w; x++) {
          const int64_t at = y * layer->conv_w + x;
          if (!room->num_by_column[at]) continue;
          float *to = room->slope + b * layer->sample + (y * layer->stride + kh) * row + x * layer->stride * layer->channels;
          gather(length, to, room->by_column + at * layer->out_c, room->num_by_column[at], weight + kh * wide,
                 kernel_h * wide);
        }
  }
  take_step(weight, room->gradient, layer->packed_at, layer->rows * wide, step);
  if (layer->bias_at >= 0) take_step(bias, room->bias_gradient, layer->packed_bias_at, UP16(layer->out_c), step);
}
