#include "chain.h"

#include <math.h>

#define MOST_LAYERS 31

/* e^x for x <= 0, and NaN for NaN: 2^n * e^r with |r| <= ln 2 / 2; within 2 units in the last place. */
static float exp_of(float x) {
  if (!(x >= -87)) return x != x ? x : 0;
  const float n = rintf(x * 1.44269504f);
  float r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1;
  const union { int32_t bits; float value; } power = {((int32_t)n + 127) << 23};
  return p * power.value;
}

void take_step(float *weight, const float *gradient, int64_t at, int64_t size, const Step *step) {
  if (step->plain) {
    for (int64_t i = 0; i < size; i++) weight[i] -= step->lr * gradient[i];
    return;
  }
  const float lr = step->lr, momentum = step->momentum, decay = step->decay, pull = step->pull;
  for (int64_t i = 0; i < size; i++) {
    float g = gradient[i];
    if (step->anchor) g += pull * (weight[i] - step->anchor[at + i]);
    if (step->shift) g += step->shift[at + i];
    g += decay * weight[i];
    if (step->velocity) {
      const float v = momentum * step->velocity[at + i] + g;
      step->velocity[at + i] = v;
      g = step->nesterov ? g + momentum * v : v;
    }
    weight[i] -= lr * g;
  }
}

/* Fill in what follows from the sizes of the layers; return how many packed weights there are. */
int64_t atoll_plan(Layer *layers, int64_t num) {
  int64_t at = 0;
  for (int64_t i = 0; i < num; i++) {
    Layer *layer = layers + i;
    layer->channels = i && layer[-1].is_conv ? UP16(layer->in_c) : layer->in_c;
    if (layer->is_conv) {
      layer->height = layer->in_h + 2 * layer->pad, layer->width = layer->in_w + 2 * layer->pad;
      layer->conv_h = (layer->height - layer->kernel_h) / layer->stride + 1;
      layer->conv_w = (layer->width - layer->kernel_w) / layer->stride + 1;
      layer->out_h = layer->conv_h / layer->pool, layer->out_w = layer->conv_w / layer->pool;
      layer->rows = layer->out_c * layer->kernel_h, layer->wide = UP16(layer->kernel_w * layer->channels);
      layer->sample = layer->height * layer->width * layer->channels;
    } else {
      layer->height = layer->in_h, layer->width = layer->in_w;
      layer->conv_h = layer->conv_w = layer->out_h = layer->out_w = 1;
      layer->rows = i && !layer[-1].is_conv ? layer[-1].wide : layer->in_h * layer->in_w * layer->channels;
      layer->wide = UP16(layer->out_c);
      layer->sample = layer->rows;
    }
    layer->packed_at = at, at += UP16(layer->rows * layer->wide);
    layer->packed_bias_at = at, at += UP16(layer->out_c);
  }
  return at;
}

/* Copy between a flat vector and packed weights, a tile at a time. */
static void exchange(const Layer *layer, float *flat, float *packed, int to_packed) {
  const int64_t outs = layer->out_c, high = layer->is_conv ? layer->kernel_h : layer->in_h;
  const int64_t across = layer->is_conv ? layer->kernel_w : layer->in_w, ins = layer->in_c, channels = layer->channels;
  float *weight = flat + layer->weight_at, *there = packed + layer->packed_at;
  for (int64_t first = 0; first < outs; first += LANES)
    for (int64_t y = 0; y < high; y++)
      for (int64_t x = 0; x < across; x++)
        for (int64_t c = 0; c < ins; c++)
          for (int64_t o = first; o < outs && o < first + LANES; o++) {
            float *here = weight + ((o * ins + c) * high + y) * across + x;
            float *other = layer->is_conv ? there + (o * high + y) * layer->wide + x * channels + c
                                          : there + ((y * across + x) * channels + c) * layer->wide + o;
            if (to_packed) *other = *here;
            else *here = *other;
          }
  if (layer->bias_at < 0) return;
  float *bias = flat + layer->bias_at, *bias_there = packed + layer->packed_bias_at;
  for (int64_t o = 0; o < outs; o++)
    if (to_packed) bias_there[o] = bias[o];
    else bias[o] = bias_there[o];
}

void atoll_pack(const Layer *layers, int64_t num, int64_t num_packed, const float *flat, float *packed) {
  memset(packed, 0, sizeof(float) * (size_t)num_packed);
  for (int64_t i = 0; i < num; i++) exchange(layers + i, (float *)flat, packed, 1);
}

void atoll_unpack(const Layer *layers, int64_t num, const float *packed, float *flat) {
  for (int64_t i = 0; i < num; i++) exchange(layers + i, flat, (float *)packed, 0);
}

static float *taken(float **room, int64_t size) {
  float *begin = *room;
  *room += UP16(size) + LANES;
  return begin;
}

/* Lay out what the layers work with; return how many floats that takes. */
int64_t atoll_rooms(const Layer *layers, int64_t num, int64_t most, float *memory, Room *rooms) {
  float *at = memory;
  Room unused;
  for (int64_t i = 0; i < num; i++) {
    const Layer *layer = layers + i;
    Room *room = rooms ? rooms + i : &unused;
    const int64_t outs = UP16(layer->out_c), conv = layer->conv_h * layer->conv_w, out = layer->out_h * layer->out_w;
    const int64_t num_rows = layer->is_conv ? layer->out_c : most, num_columns = layer->is_conv ? conv : layer->rows;
    const int64_t entries = layer->is_conv ? layer->out_c * conv : most * layer->rows;
    room->input = taken(&at, most * layer->sample + 64);
    room->slope = taken(&at, i ? most * layer->sample + 64 : 0);
    room->outputs = taken(&at, layer->is_conv ? conv * outs : most * layer->wide);
    room->picked = (uint8_t *)taken(&at, layer->is_conv ? (most * out * outs + 3) / 4 : 0);
    room->by_row = (Entry *)taken(&at, 2 * (entries + 1));
    room->by_column = (Entry *)taken(&at, 2 * (entries + 1));
    room->num_by_row = (int32_t *)taken(&at, num_rows);
    room->num_by_column = (int32_t *)taken(&at, num_columns);
    room->place = (int32_t *)taken(&at, num_rows);
    room->gradient = taken(&at, layer->is_conv ? layer->rows * layer->wide : (most + 1) * layer->wide);
    room->forward = taken(&at, layer->is_conv ? layer->kernel_h * layer->wide * outs : 0);
    room->bias_gradient = taken(&at, outs);
  }
  return at - memory;
}

typedef struct {
  const uint8_t *bytes;
  const float *floats; /* one of the two */
  const int64_t *labels;
  int64_t sample; /* numbers of one */
  float scale, shift;
} Data;

/* Samples as the first layer wants them; of a linear layer, the list of what is not zero in each. */
static void take_samples(const Layer *layer, const Room *room, const Data *data, const int64_t *index, int64_t num) {
  const int64_t area = layer->in_h * layer->in_w;
  for (int64_t b = 0; b < num; b++) {
    const uint8_t *bytes = data->bytes ? data->bytes + index[b] * data->sample : 0;
    const float *floats = data->bytes ? 0 : data->floats + index[b] * data->sample;
    float *to = room->input + b * layer->sample;
    if (!layer->is_conv) {
      Entry *entry = room->by_row + b * layer->rows;
      room->num_by_row[b] = bytes ? list_bytes(entry, bytes, data->sample, data->scale, data->shift)
                                  : list_floats(entry, floats, data->sample, data->scale, data->shift);
      continue;
    }
    for (int64_t c = 0; c < layer->in_c; c++)
      for (int64_t i = 0; i < area; i++) {
        const int64_t y = i / layer->in_w + layer->pad, x = i % layer->in_w + layer->pad;
        const float raw = bytes ? (float)bytes[c * area + i] : floats[c * area + i];
        to[(y * layer->width + x) * layer->channels + c] = raw * data->scale + data->shift;
      }
  }
}

static void run_forward(const Layer *layers, const Room *rooms, int64_t num, const float *packed, int64_t batch) {
  for (int64_t i = 0; i < num; i++) {
    const Layer *layer = layers + i;
    const Room *room = rooms + i;
    const float *weight = packed + layer->packed_at, *bias = packed + layer->packed_bias_at;
    if (layer->is_conv) {
      conv_prepare(layer, room, weight);
      conv_forward(layer, room, bias, layer + 1, room[1].input, batch);
      continue;
    }
    if (i)
      for (int64_t b = 0; b < batch; b++)
        room->num_by_row[b] =
            list_floats(room->by_row + b * layer->rows, room->input + b * layer->rows, layer->rows, 1, 0);
    linear_forward(layer, room, weight, bias, batch);
    if (i + 1 < num)
      for (int64_t k = 0; k < batch * layer->wide; k++)
        room[1].input[k] = room->outputs[k] <= 0 ? 0 : room->outputs[k];
  }
}

/* Softmax and cross entropy in place: outputs become the slopes of the batch's mean loss, which is returned. */
static double cross_entropy(const Layer *layer, float *outputs, const int64_t *labels, const int64_t *index,
                            int64_t num) {
  double sum = 0;
  const float share = 1 / (float)num;
  for (int64_t b = 0; b < num; b++) {
    float *row = outputs + b * layer->wide, largest = row[0], all = 0;
    const int64_t label = labels[index[b]];
    for (int64_t n = 1; n < layer->out_c; n++) largest = row[n] > largest ? row[n] : largest;
    const float target = row[label] - largest;
    for (int64_t n = 0; n < layer->out_c; n++) row[n] = exp_of(row[n] - largest), all += row[n];
    sum += log((double)all) - (double)target;
    for (int64_t n = 0; n < layer->out_c; n++) row[n] = row[n] / all * share;
    row[label] -= share;
  }
  return sum / (double)num;
}

/* Take a client's steps, by batches of these sizes, whose samples follow each other in `index`. `packed` is moved.
   Return the mean of the batches' losses. */
static double train(const Layer *layers, const Room *rooms, int64_t num, const Data *data, const int64_t *index,
                    const int64_t *sizes, int64_t num_steps, float *packed, const Step *step) {
  const Layer *last = layers + num - 1;
  double sum = 0;
  for (int64_t s = 0, at = 0; s < num_steps; at += sizes[s++]) {
    const int64_t batch = sizes[s];
    take_samples(layers, rooms, data, index + at, batch);
    run_forward(layers, rooms, num, packed, batch);
    float *slope = rooms[num - 1].outputs;
    sum += cross_entropy(last, slope, data->labels, index + at, batch);
    for (int64_t i = num - 1; i >= 0; i--) {
      float *weight = packed + layers[i].packed_at, *bias = packed + layers[i].packed_bias_at;
      if (layers[i].is_conv)
        conv_backward(layers + i, rooms + i, weight, bias, layers + i + 1, rooms[i + 1].input, slope, i == 0, step,
                      batch);
      else
        linear_backward(layers + i, rooms + i, weight, bias, slope, i == 0, step, batch);
      slope = rooms[i].slope;
    }
  }
  return num_steps ? sum / (double)num_steps : 0;
}

static void clear(const Layer *layers, const Room *rooms, int64_t num, int64_t most) {
  for (int64_t i = 0; i < num; i++) memset(rooms[i].input, 0, sizeof(float) * (size_t)(most * layers[i].sample + 64));
}

/* Train clients one after another. A client has the flat vector that it starts from, which several may share, and one
   that its steps add or none; its batches follow those of the client before. What it moved by goes into its row of
   `deltas`. */
void atoll_train(const Layer *layers, int64_t num, int64_t num_packed, const Data *data, int64_t num_clients,
                 const float *const *starts, const float *const *shifts, const int64_t *index, const int64_t *sizes,
                 const int64_t *num_steps, Step *steps, int64_t most, int64_t num_params, float *deltas,
                 double *losses, float *scratch, float *memory) {
  Room rooms[MOST_LAYERS];
  float *start = scratch, *packed = scratch + num_packed, *velocity = packed + num_packed;
  float *shift = velocity + num_packed;
  atoll_rooms(layers, num, most, memory, rooms);
  clear(layers, rooms, num, most);
  for (int64_t g = 0; g < num_clients; g++) {
    Step *step = steps + g;
    if (!g || starts[g] != starts[g - 1]) atoll_pack(layers, num, num_packed, starts[g], start);
    memcpy(packed, start, sizeof(float) * (size_t)num_packed);
    if (shifts[g]) atoll_pack(layers, num, num_packed, shifts[g], shift);
    if (step->momentum != 0) memset(velocity, 0, sizeof(float) * (size_t)num_packed);
    step->shift = shifts[g] ? shift : 0;
    step->velocity = step->momentum != 0 ? velocity : 0;
    step->anchor = step->pull != 0 ? start : 0;
    step->plain = !step->shift && !step->velocity && !step->anchor && step->decay == 0;
    losses[g] = train(layers, rooms, num, data, index, sizes, num_steps[g], packed, step);
    for (int64_t s = 0; s < num_steps[g]; s++) index += *sizes++;
    for (int64_t i = 0; i < num_packed; i++) packed[i] -= start[i];
    atoll_unpack(layers, num, packed, deltas + g * num_params);
  }
}

/* The model's outputs for some samples (num, out_c of the last layer), `most` at a time. */
void atoll_outputs(const Layer *layers, int64_t num, const Data *data, const int64_t *index, int64_t num_samples,
                   int64_t most, const float *packed, float *outputs, float *memory) {
  Room rooms[MOST_LAYERS];
  atoll_rooms(layers, num, most, memory, rooms);
  const Layer *last = layers + num - 1;
  clear(layers, rooms, num, most);
  for (int64_t at = 0; at < num_samples; at += most) {
    const int64_t batch = num_samples - at < most ? num_samples - at : most;
    take_samples(layers, rooms, data, index + at, batch);
    run_forward(layers, rooms, num, packed, batch);
    for (int64_t b = 0; b < batch; b++)
      memcpy(outputs + (at + b) * last->out_c, rooms[num - 1].outputs + b * last->wide,
             sizeof(float) * (size_t)last->out_c);
  }
}
