/*
 * What the cuda tests share: a context and a stream of the device, and worlds that live there.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_TEST_CUDA_TWIN_H
#define CSA_TEST_CUDA_TWIN_H

#include "support.h"

#include <cuda_runtime_api.h>

#define CHECK_CUDA(call) expect_cuda(__LINE__, #call, (call))
void expect_cuda(int line, const char *what, cudaError_t error);

extern csa_context *context;
extern cudaStream_t stream;
extern const char *tier; /* CSA_TEST_TIER */

csa_context *cuda_context(csa_context_options options);

/* Of the whole program: context and stream. */
int start(void **state);
int end(void **state);

#define skip_if_quick()                                            \
    do {                                                           \
        if (test_quick()) {                                        \
            print_message("skipped: too large for a quick run\n"); \
            skip();                                                \
        }                                                          \
    } while (0)

/* ---- Twins: a world on the host, and the same in device memory ---------------------------------- */

enum { MOST_BUFFERS = 80 };

typedef struct twin {
    world host, device;
    void *memory[MOST_BUFFERS]; /* of the arena's buffers, in their order */
    csa_plan *plan;             /* of all tokens, once asked for */
} twin;

void *allocate(size_t bytes);
csa_workspace make_workspace(const csa_serving *serving);
void make_twin(twin *t, world_shape shape, uint64_t number);
void end_twin(twin *t);
void to_device(twin *t);

/* All bytes, gaps too: arena_check then sees what was written there. */
void to_host(twin *t);

/* Owners of a planned step's tokens follow from query_start. */
void add_plan(twin *t);

typedef enum kind { DECODE, LAYER, PLANNED_LAYER } kind;

csa_status queue(kind k, twin *t);

/* Requests end after `percent` of their tokens. */
void set_lengths(world *w, int percent);

void set_scales(world *w, float k, float v);

/* Nothing may rest on what lies in a workspace between two steps. */
void spoil_workspace(const twin *t, int byte);

/* ---- Tests of sizes, cuda_sizes.c --------------------------------------------------------------- */

void decode_takes_many_rows(void **state);
void too_many_rows_are_refused(void **state);
void stages_take_many_rows(void **state);
void prepare_takes_many_tokens(void **state);
void blocks_may_lie_far_apart(void **state);
void long_rows_are_selected(void **state);
void long_steps_select_like_stages(void **state);

#endif
