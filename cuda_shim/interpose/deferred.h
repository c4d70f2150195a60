/* Linear memory freed in stream order (cuMemFreeAsync): the driver lets go of it when the stream has got there, and so does the charge. */
#ifndef AQ_INTERPOSE_DEFERRED_H
#define AQ_INTERPOSE_DEFERRED_H

#include <stdbool.h>
#include <stdint.h>

#include "account/map.h"
#include "cuda_abi.h"
#include "interpose/context.h"

/* Credit `held` once everything now in `stream` is done. False when that cannot be told, or from inside a latch: nothing is kept. */
bool aq_deferred_add(const struct aq_entry *held, CUstream stream, bool per_thread);
/* Credit what is due. */
void aq_deferred_settle(void);
/* A context is gone, and the memory that lived in it: credit it, due or not. */
void aq_deferred_drop(int device, uint64_t owner);
/* Around a call that may end a context: its streams are not asked, and when it ended they have come to their ends. */
void aq_deferred_context_ending(const struct aq_ending *ending);
void aq_deferred_context_ended(const struct aq_ending *ending, bool has_ended);
/* In a forked child. */
void aq_deferred_forget(void);

#endif
