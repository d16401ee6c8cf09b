/*
 * csa replay: scoring, selection and attention as parts that single stages and whole steps share.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_REPLAY_PARTS_H
#define CSA_REPLAY_PARTS_H

#include "replay.h"

enum { REPLAY_MOST = 1 << 16 }; /* more heads, groups and such than any size could mean */

/* What rows know and how they score. */
typedef struct replay_scoring {
    csa_tokens tokens;
    csa_cache cache;
    csa_rows rows;
    csa_tensor query, weights; /* the index query [T, G, heads, 256] and its weights */
    csa_tensor scores;         /* [R, regions] */
    int64_t count, groups, regions;
    judge_row *places; /* the tool's own view of the rows */
    int64_t *limits;   /* per row: scores that are specified */
    judge_cache judge;
    judge_query loaded; /* of row loaded_row */
    int64_t loaded_row;
} replay_scoring;

/* Memory of the case for `count` things of `size` bytes. */
void *replay_memory(replay_case *c, int64_t count, size_t size);

csa_rows replay_row_outputs(replay_case *c, int64_t rows);

/* Tokens of a decode call: table, seq_lens, slots and query_len (1 if not said). */
void replay_load_tokens(replay_case *c, replay_scoring *s, int64_t groups);

/* Tokens of a prefill call: table, positions and owners. */
void replay_load_prefill(replay_case *c, replay_scoring *s);

/* Reads summaries and `regions`, and makes room for scores and rows. */
void replay_load_scoring(replay_case *c, replay_scoring *s, csa_tensor query, csa_tensor weights);

/* Calls csa_score. */
void replay_score_rows(replay_case *c, replay_scoring *s);

/* Row metadata against the recording and the tool's own. A step has positions and active alone as outputs. */
void replay_check_rows(replay_case *c, const replay_scoring *s, bool keep_all);

replay_scorer replay_scorer_of(replay_scoring *s);

/* Calls csa_select and returns its selection. */
csa_tensor replay_select_rows(replay_case *c, csa_tensor scores, csa_tensor current, int64_t topk);

/* A cache input, bf16 or e4m3 as the scalar fp8 says, and its scales. */
csa_tensor replay_kv(replay_case *c, const char *name, csa_cache *cache, int64_t groups);

/* Attention of the rows of some tokens. */
typedef struct replay_attention {
    csa_attend_args args; /* tokens, cache and rows belong to the caller */
    judge_cache judged;
    judge_attend_args judge;
    csa_tensor query, out; /* [R, heads, 192] */
    csa_tensor lse;        /* [R, heads] */
    int64_t groups;
} replay_attention;

/* Reads query, gate and scale, and makes room for the output. */
void replay_load_attention(replay_case *c, replay_attention *a, const csa_tokens *tokens,
                           const csa_cache *cache, int64_t count, int64_t groups);

/* New outputs; the old ones stay. */
void replay_renew_attention(replay_case *c, replay_attention *a);

/* Points args.out and args.lse to the outputs. */
void replay_bind_attention(replay_attention *a);

/* Calls csa_attend for a selection [R, columns]. */
void replay_attend_rows(replay_case *c, replay_attention *a, csa_tensor selected, const csa_rows *rows);

/* Judges what attention to a selection gave, and compares it with the recorded output of that name. */
void replay_check_attended(replay_case *c, const char *name, csa_tensor got, replay_attention *a,
                           csa_tensor selected, const judge_row *rows);

/* The same for what was not recorded. */
void replay_judge_attended(replay_case *c, const char *what, csa_tensor got, replay_attention *a,
                           csa_tensor selected, const judge_row *rows);

#endif
