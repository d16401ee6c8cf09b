/*
 * What the hostile tests share: comparisons of a call's outputs with the oracle, for calls whose ids may be
 * bad, since they are looked up as docs/SPEC.md says; who wrote which rows; refusals.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_TEST_HOSTILE_H
#define CSA_TEST_HOSTILE_H

#include "support.h"

/* Where a token stands (csa.h, "what calls share"). request is -1 if it belongs to none. */
typedef struct seat {
    bool active;
    int64_t request, position;
} seat;
seat spec_seat(const csa_tokens *tokens, int64_t token);

/* A row's metadata and regions' scores; scores within the bound of section 4. */
void expect_scores(const csa_score_args *a);
/* The same choice as a plain sort makes (section 5). */
void expect_selected(const csa_select_args *a);
/* Outputs within captures/README.md's tolerance, zeros exactly, log-sum-exp within section 6's bound. */
void expect_attended(const csa_attend_args *a);
/* A step's outputs (selected and lse where present) against all of it; runs csa_score for the scores. */
void expect_step(const csa_context *context, const csa_step_args *a);

/* The eight rows' summary as section 3's formula gives it; rows are index key, then z. */
void spec_summary(float rows[8][512], uint8_t summary[256]);

/* Four threads; two threads in checking mode; one thread, for ids that make tokens write the same memory. Made
 * once each. */
csa_context *plain_context(void);
csa_context *checking_context(void);
csa_context *serial_context(void);

/* A tensor of one extent or two in the world's memory, filled from values. */
csa_tensor ids_i64(arena *memory, const char *name, int64_t count, const int64_t *values);
csa_tensor ids_i32(arena *memory, const char *name, int64_t count, const int32_t *values);

/* A dense copy, and the rows (over all extents but the last) in which a tensor differs from it: exactly these.
 */
csa_tensor copy_of(arena *memory, const csa_tensor *t);
void expect_rows_written(const char *name, const csa_tensor *before, const csa_tensor *after, int64_t count,
                         const int64_t *rows);

/* New inputs for token t of the world's step, prepare's and z: the same for the same tag. */
void token_inputs(world *w, int64_t t, uint64_t tag);

/* The call fails with the status, and its error text holds each of the words (NULL ends them). */
void expect_refused(csa_status got, csa_status expected, ...) __attribute__((sentinel));

#define COUNT_OF(array) ((int64_t)(sizeof(array) / sizeof *(array)))

#endif
