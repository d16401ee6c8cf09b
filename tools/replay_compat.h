/*
 * csa replay: the reference's formats (csa_compat.h) as parts of a prefill step.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_REPLAY_COMPAT_H
#define CSA_REPLAY_COMPAT_H

#include "replay_parts.h"

/* Scores over packed pages. */
typedef struct replay_packed {
    bool paired;       /* rows 2i and 2i + 1 in one entry, 4 heads */
    csa_tensor scores; /* [T, regions] */
    replay_scoring *scoring;
    int64_t *limits;
} replay_packed;

/* Packs the summaries of a scoring's cache and scores its rows. */
void replay_score_packed(replay_case *c, replay_packed *packed, replay_scoring *scoring, int64_t topk);

/* What they should be, straight from the summaries. */
replay_scorer replay_packed_scorer(replay_packed *packed);

/* Page lists of a selection and, where there is such a plan, attention over them: checks pages, page_indptr and
 * out_paged. */
void replay_attend_pages(replay_case *c, const replay_scoring *s, replay_attention *a, csa_tensor selected);

/* Attention over gathered rows: checks out_ragged. */
void replay_attend_gathered(replay_case *c, const replay_scoring *s, replay_attention *a, csa_tensor selected);

#endif
