/*
 * Section 3 on a host back end, but for its arithmetic: which rows a region's summary is made of, where it
 * goes, and the tail ring that keeps an open region's rows. A back end brings the softmax over the rows.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_SUMMARIZE_HOST_H
#define CSA_SUMMARIZE_HOST_H

#include "context.h"

/* A token's share on average, in nanoseconds: most only copy a row, one of eight makes a summary. */
enum { CSA_SUMMARIZE_COST = 200 };

/* A closed region's rows in position order: eight, less the inactive tokens that are left out. */
typedef struct csa_region_rows {
    const uint16_t *key[CSA_REGION], *z[CSA_REGION];
    int count;
} csa_region_rows;

/* Makes 256 bytes of e4m3 from the rows. */
typedef void (*csa_summary)(const csa_region_rows *rows, uint8_t *summary);

csa_status csa_host_summarize_decode(const csa_context *context, const csa_summarize_args *args,
                                     csa_summary summary);
csa_status csa_host_summarize_verify(const csa_context *context, const csa_summarize_args *args,
                                     csa_summary summary);
csa_status csa_host_summarize_prefill(const csa_context *context, const csa_summarize_args *args,
                                      csa_summary summary);
/* One piece of a decode (a token) or a verify step (a request's tokens), for a back end that has made its index
 * keys just now. */
void csa_host_summarize_piece(const csa_summarize_args *args, csa_summary summary, int64_t piece);
csa_status csa_host_summarize_metadata(const csa_context *context, const csa_summarize_args *args);

#endif
