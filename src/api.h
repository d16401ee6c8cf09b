/*
 * A call's arguments, checked and normalised (stages.h says how). Each check_* copies what the caller gave,
 * nested descriptors too, so that `args` below points only into the same struct.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_CHECKED_H
#define CSA_CHECKED_H

#include "args.h"

typedef struct csa_nested {
    csa_tokens tokens;
    csa_cache cache;
    csa_rows rows;
} csa_nested;

typedef struct csa_prepare_call {
    csa_prepare_args args;
    csa_nested nested;
} csa_prepare_call;

typedef struct csa_summarize_call {
    csa_summarize_args args;
    csa_nested nested;
} csa_summarize_call;

typedef struct csa_score_call {
    csa_score_args args;
    csa_nested nested;
} csa_score_call;

typedef struct csa_attend_call {
    csa_attend_args args;
    csa_nested nested;
} csa_attend_call;

typedef struct csa_step_call {
    csa_step_args args;
    csa_nested nested;
} csa_step_call;

typedef struct csa_layer_call {
    csa_layer_args args;
    csa_prepare_call prepare;
    csa_rows rows;
} csa_layer_call;

void csa_check_prepare(csa_checker *c, const csa_prepare_args *from, csa_prepare_call *to);
void csa_check_summarize(csa_checker *c, csa_op op, const csa_summarize_args *from, csa_summarize_call *to);
void csa_check_score(csa_checker *c, const csa_score_args *from, csa_score_call *to);
void csa_check_select(csa_checker *c, const csa_select_args *from, csa_select_args *to);
void csa_check_attend(csa_checker *c, const csa_attend_args *from, csa_attend_call *to);
void csa_check_gate(csa_checker *c, const csa_gate_args *from, csa_gate_args *to);
void csa_check_step(csa_checker *c, const csa_context *context, const csa_plan *plan, const csa_step_args *from,
                    csa_step_call *to);
void csa_check_layer(csa_checker *c, const csa_context *context, const csa_plan *plan,
                     const csa_layer_args *from, csa_layer_call *to);

/* Starts a checker; refuses a NULL context. */
csa_checker csa_begin(const csa_context *context, const char *call);

/* 0 becomes 512; refuses what is outside 1 to 1024. */
int32_t csa_check_topk(csa_checker *c, int32_t topk);

/* The ring's capacity must hold what a step needs; query_len 0: not a verify step. */
void csa_check_ring(csa_checker *c, const csa_nested *n, int64_t query_len);

/* A workspace must have what is needed, at an aligned address; 0: it is not looked at. */
void csa_check_workspace(csa_checker *c, csa_workspace workspace, size_t needed);

/* Tensors that attend, steps and layers have in common. */
void csa_check_attention(csa_checker *c, csa_tensor *query, csa_tensor *gate, csa_tensor *out, csa_tensor *lse,
                         csa_dim *tokens, csa_dim *groups);

/* Score's query and weights. */
void csa_check_index(csa_checker *c, csa_tensor *query, csa_tensor *weights, csa_dim *tokens, csa_dim *groups);

#endif
