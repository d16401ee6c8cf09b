/*
 * What the tests of the reference's formats and plans (csa_compat.h, section 9) share: their two contexts,
 * random shapes, readers of lists, and lists of a selection. SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_TEST_COMPAT_H
#define CSA_TEST_COMPAT_H

#include "support.h"

#include <csa/csa_compat.h>

enum { DRAWS = 40 };

/* Of three threads, and in checking mode: there from compat_set_up to compat_tear_down. */
extern csa_context *context, *checking;

int compat_set_up(void **state);
int compat_tear_down(void **state);

/* The status, and an error text with these words in it (NULL: any). */
void expect_status(csa_status got, csa_status expected, const char *words);

/* ---- Straightforward definitions ---------------------------------------------------------------- */

/* The block of a request's column, -1 if the table does not lead to one. */
int64_t block_of(const csa_tensor *table, int64_t request, int64_t column, int64_t blocks);

static inline int64_t at(const csa_tensor *t, int64_t i)
{
    return (int64_t)tensor_value(t, i, 0, 0, 0);
}

static inline int32_t at2(const csa_tensor *t, int64_t i, int64_t j)
{
    return *(int32_t *)tensor_at(t, i, j, 0, 0);
}

static inline int64_t entry(const csa_tensor *list, int64_t i, int64_t j)
{
    return *(int64_t *)tensor_at(list, i, j, 0, 0);
}

/* -1 where the token is inactive. */
static inline int64_t position_of(const world *w, int64_t token)
{
    return at(&w->step.slots, token) < 0 || at(&w->step.positions, token) < 0 ? -1
                                                                              : at(&w->step.positions, token);
}

static inline int64_t owner_of(const world *w, int64_t token)
{
    return token / w->shape.query_len;
}

/* One KV group of the world's cache. */
csa_cache one_group(const world *w, int64_t group);

/* Some entries of the block table lead nowhere. */
void spoil_table(world *w);

world_shape random_shape(uint64_t draw);

/* ---- Lists of a selection ----------------------------------------------------------------------- */

typedef struct page_case {
    world w;
    csa_cache cache;
    csa_compat_pages_args args;
} page_case;

/* A world of the draw and a call on it; junk: in the block table and in the lists. */
void make_pages(page_case *p, int draw, bool junk);

int64_t used_entries(const world *w, int64_t token, int64_t columns);

/* The block of an entry's region; -1 where attention would skip it. */
int64_t entry_block(const world *w, int64_t token, int64_t region);

bool pages_possible(const csa_tensor *kv);

/* Gathers the same selection. */
csa_compat_gather_args make_gather(page_case *p);

#endif
