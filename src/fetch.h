/*
 * Checking mode where ids are device memory: the checks of check.h run on host copies. A call's normalised
 * tensors lead to their copies for that long, and are put back before the call's stage runs. On host back ends
 * nothing is copied.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_FETCH_H
#define CSA_FETCH_H

#include "args.h"

enum { CSA_MOST_FETCHED = 12 }; /* tensors of ids in one call */

typedef struct csa_fetched {
    csa_checker *checker;
    const csa_context *context;
    void *stream;
    int count;
    struct {
        csa_tensor *at, was;
        void *copy;
    } tensors[CSA_MOST_FETCHED];
} csa_fetched;

/* Is there anything to check: has the context checking mode, and is the call in order so far? */
bool csa_checking(csa_fetched *f, csa_checker *c, const csa_context *context, void *stream);

/* Makes a tensor of ids readable. What fails is refused, and then there is nothing to read. */
void csa_fetch(csa_fetched *f, csa_tensor *t);
void csa_fetch_tokens(csa_fetched *f, csa_tokens *tokens);

/* Puts the tensors back. */
void csa_end_fetch(csa_fetched *f);

#endif
