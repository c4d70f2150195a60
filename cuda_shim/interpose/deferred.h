/* SPDX-License-Identifier: Apache-2.0 */
/* Linear memory freed in stream order (cuMemFreeAsync): the driver releases it when the stream reaches the free, and so does the charge. */
#ifndef AQ_INTERPOSE_DEFERRED_H
#define AQ_INTERPOSE_DEFERRED_H

#include <stdbool.h>
#include <stdint.h>

#include "account/map.h"
#include "cuda_abi.h"
#include "interpose/life_cycle.h"

/* Uncharge `held` once everything now in `stream` is done. False, and no record is made, when that cannot be observed or inside a latch. */
bool aq_deferred_add(const struct aq_entry *held, CUstream stream, bool per_thread);
/* Credit what is due. */
void aq_deferred_settle(void);
/* A context has ended with the memory in it: uncharge that memory, due or not. */
void aq_deferred_context_gone(int device, uint64_t owner);
/* Around a call that may end a context: its streams are not queried meanwhile. If it ended, its streams are complete. */
void aq_deferred_context_ending(const struct aq_ending *ending);
void aq_deferred_context_ended(const struct aq_ending *ending, bool has_ended);
/* In a forked child. */
void aq_deferred_forget(void);

#endif
