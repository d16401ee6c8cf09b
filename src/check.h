/*
 * Checking mode: the contents of id tensors, which the host must be able to read (fetch.h). Each function names
 * the first bad id. Arguments are normalised. Padding (inactive tokens) is not looked at.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_CHECK_H
#define CSA_CHECK_H

#include "args.h"

void csa_check_prepare_ids(csa_checker *c, const csa_prepare_args *a);
void csa_check_summarize_ids(csa_checker *c, csa_op op, const csa_summarize_args *a);

/* Owners, positions below `regions` regions, and the block-table entries that the tokens see; cache is kv or
 * summaries. */
void csa_check_seen_ids(csa_checker *c, const csa_tokens *tokens, const csa_tensor *cache, int64_t count,
                        int64_t regions);

/* An active token must stand in one of so many regions. */
void csa_check_region(csa_checker *c, const csa_tokens *tokens, int64_t token, int64_t regions);

void csa_check_select_ids(csa_checker *c, const csa_select_args *a);
void csa_check_attend_ids(csa_checker *c, const csa_attend_args *a);

#endif
