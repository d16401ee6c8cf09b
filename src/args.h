/*
 * Checking what a caller hands in. A checker remembers the first fault and ignores what follows, so that checks
 * read as a list; each fault names call, argument, value and what would be accepted.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_ARGS_H
#define CSA_ARGS_H

#include "context.h"
#include "tensor.h"

typedef struct csa_checker {
    const char *call;
    csa_status status; /* CSA_OK so far */
} csa_checker;

/* An extent that several tensors share. The first tensor that has it decides, unless `allowed` says that the
 * model fixes it. */
typedef struct csa_dim {
    const char *name;
    int64_t extent;      /* -1: not known yet */
    const char *source;  /* the argument that decided */
    const char *allowed; /* what is supported, for a fixed one */
} csa_dim;

#define CSA_DIM(name)                        ((csa_dim){name, -1, NULL, NULL})
#define CSA_KNOWN_DIM(name, extent, source)  ((csa_dim){name, extent, source, NULL})
#define CSA_FIXED_DIM(name, extent, allowed) ((csa_dim){name, extent, NULL, allowed})

enum {
    CSA_ARG_OPTIONAL = 1, /* may be absent */
    CSA_ARG_OUT = 2,      /* its elements must lie apart */
    CSA_ARG_NO_DATA = 4   /* data is not needed */
};

/* Records a fault. */
__attribute__((format(printf, 3, 4))) void csa_refuse(csa_checker *c, csa_status status, const char *format,
                                                      ...);

/* Copies a descriptor of any version into one of this version, `known` bytes. */
void csa_take(csa_checker *c, void *to, const void *from, size_t known, const char *type);

/* Checks a tensor against dtype and dims (ndim pointers to csa_dim follow) and normalises it as stages.h says.
 */
void csa_check_tensor(csa_checker *c, const char *name, csa_tensor *t, int flags, csa_dtype dtype, int ndim,
                      ...);

/* value must lie in [low, high]. */
void csa_check_range(csa_checker *c, const char *name, int64_t value, int64_t low, int64_t high);

/* What several calls share, checked. Dims are those of the caller. */
enum {
    CSA_NEED_TABLE = 1,       /* block_table */
    CSA_NEED_SLOTS = 2,       /* slots */
    CSA_NEED_POSITIONS = 4,   /* positions or seq_lens */
    CSA_NEED_QUERY_START = 8, /* query_start */
    CSA_NEED_KV = 16,         /* cache.kv */
    CSA_NEED_SUMMARIES = 32   /* cache.summaries */
};
void csa_check_tokens(csa_checker *c, const csa_tokens *from, int needs, csa_dim *tokens, csa_tokens *to);
void csa_check_cache(csa_checker *c, const csa_cache *from, int needs, csa_dim *groups, csa_cache *to);
void csa_check_rows(csa_checker *c, const csa_rows *from, int flags, const csa_dim *tokens,
                    const csa_dim *groups, csa_rows *to);

/* A dtype that is one of two: second if t has it, else first. */
csa_dtype csa_either(const csa_tensor *t, csa_dtype first, csa_dtype second);

/* R = T * G, where both are known. */
csa_dim csa_rows_dim(const csa_dim *tokens, const csa_dim *groups);

#endif
