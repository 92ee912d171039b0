/* Training of chains of layers (linear, convolution, ReLU, max pooling; cross entropy) by stochastic gradient descent.

   Everything is single precision on one thread. Sums run in an order that the shapes alone decide, every product is
   added by a fused operation, and vectors are 16 wide whatever the processor has: the results are the same to the bit
   with AVX-512, AVX2 and NEON. What is zero in a layer's input is left out of products, which changes no sum of finite
   numbers. Shapes: B samples of a batch, K inputs and N outputs of a linear layer; a size with p is padded to 16. */

#ifndef ATOLL_CHAIN_H
#define ATOLL_CHAIN_H

#include <stdint.h>
#include <string.h>

#define LANES 16
#define UP16(n) (((n) + 15) / 16 * 16)
#define INLINE static inline __attribute__((always_inline))

/* Vectors: how many numbers one holds, and how many fit into the registers as sums. */
#if defined(__AVX512F__)
#define WIDTH 16
#define WIDEST 16
#define TILE_VECTORS 4
#elif defined(__AVX2__)
#define WIDTH 8
#define WIDEST 12
#define TILE_VECTORS 2
#else
#define WIDTH 4
#define WIDEST 24
#define TILE_VECTORS 4
#endif
#define TILE_PIXELS 6
#define UNROLL _Pragma("GCC unroll 24")

/* A function for each number of vectors. */
#define EACH_6(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6)
#define EACH_12(DO) EACH_6(DO) DO(7) DO(8) DO(9) DO(10) DO(11) DO(12)
#define EACH_16(DO) EACH_12(DO) DO(13) DO(14) DO(15) DO(16)
#define EACH_24(DO) EACH_16(DO) DO(17) DO(18) DO(19) DO(20) DO(21) DO(22) DO(23) DO(24)
#if WIDEST == 16
#define ALL(DO) EACH_16(DO)
#elif WIDEST == 12
#define ALL(DO) EACH_12(DO)
#else
#define ALL(DO) EACH_24(DO)
#endif

typedef float Vector __attribute__((vector_size(WIDTH * 4)));
typedef int32_t Mask __attribute__((vector_size(WIDTH * 4)));
typedef float VectorAnywhere __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));

INLINE Vector load(const float *from) { return *(const VectorAnywhere *)from; }
INLINE Vector choose(Mask which, Vector yes, Vector no) { return (Vector)((which & (Mask)yes) | (~which & (Mask)no)); }
INLINE void store(float *to, Vector value) { *(VectorAnywhere *)to = value; }

typedef float Eight __attribute__((vector_size(32), aligned(4), may_alias));
typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));

/* The sum of 16 lanes, always by halves. */
INLINE float total(const Vector *value) {
  float lane[16] __attribute__((aligned(64)));
  for (int i = 0; i < LANES / WIDTH; i++) store(lane + i * WIDTH, value[i]);
  *(Eight *)lane += *(Eight *)(lane + 8);
  *(Four *)lane += *(Four *)(lane + 4);
  return (lane[0] + lane[2]) + (lane[1] + lane[3]);
}

/* A layer with weights, then ReLU and pooling if they follow. The caller fills in the first part; plan() the second. */
typedef struct {
  int64_t is_conv, relu, pool; /* pool: width of the window, 1 if there is none */
  int64_t in_c, in_h, in_w;    /* a linear layer behind a convolution has the image that it flattens */
  int64_t out_c, kernel_h, kernel_w, stride, pad;
  int64_t weight_at, bias_at; /* where they begin in the flat vector; bias_at is -1 if there is none */
  /* plan() */
  int64_t channels;      /* of the input as it lies: padded, but for the first layer */
  int64_t height, width; /* of the input with its border */
  int64_t conv_h, conv_w, out_h, out_w;
  int64_t rows, wide;    /* packed weights: (rows, wide); linear (Kp, Np), convolution (out_c * kernel_h, Lp) */
  int64_t packed_at, packed_bias_at;
  int64_t sample; /* floats of one sample of the input */
} Layer;

typedef struct {
  int32_t at;
  float value;
} Entry;

/* How a step is taken: by gradient g, w moves to w - lr * v with v = momentum * v + g + decay * w, where first
   pull * (w - anchor) + shift are added to g. */
typedef struct {
  float lr, momentum, decay, pull;
  int64_t nesterov, plain;
  float *velocity;
  const float *anchor, *shift;
} Step;

/* What a layer works with. */
typedef struct {
  float *input;   /* (B, sample), what is outside an image is zero */
  float *slope;   /* of the loss by the input, likewise */
  float *outputs; /* linear: (B, Np); convolution: one image (conv_h, conv_w, channels of the output) */
  uint8_t *picked;  /* (B, out_h, out_w, channels of the output): which of a window was largest */
  Entry *by_row;    /* linear: (B, Kp); convolution: (out_c, places) */
  Entry *by_column; /* linear: (Kp, B); convolution: (places, out_c) */
  int32_t *num_by_row, *num_by_column, *place;
  float *gradient;  /* convolution: as packed weights; linear: one row, and the scaled slopes (B, Np) */
  float *forward;   /* convolution: (kernel_h * Lp, padded out_c) */
  float *bias_gradient;
} Room;

int32_t list_floats(Entry *entry, const float *from, int64_t num, float scale, float shift);
int32_t list_bytes(Entry *entry, const uint8_t *from, int64_t num, float scale, float shift);
void linear_forward(const Layer *layer, const Room *room, const float *weight, const float *bias, int64_t num);
void linear_backward(const Layer *layer, const Room *room, float *weight, float *bias, const float *slope_BN, int first,
                     const Step *step, int64_t num);
void conv_prepare(const Layer *layer, const Room *room, const float *weight);
void conv_forward(const Layer *layer, const Room *room, const float *bias, const Layer *next, float *output,
                  int64_t num);
void conv_backward(const Layer *layer, const Room *room, float *weight, float *bias, const Layer *next,
                   const float *output, const float *slope, int first, const Step *step, int64_t num);
void take_step(float *weight, const float *gradient, int64_t at, int64_t size, const Step *step);

#endif
