/* Linear memory freed in stream order (cuMemFreeAsync): the driver lets go of it when the stream has got there, and so does the charge. */
#ifndef AQ_INTERPOSE_DEFERRED_H
#define AQ_INTERPOSE_DEFERRED_H

#include <stdbool.h>
#include <stdint.h>

#include "account/map.h"
#include "cuda_abi.h"

/* Credit `held` once everything now in `stream` is done. */
void aq_deferred_add(const struct aq_entry *held, CUstream stream, bool per_thread);
/* Credit what is due. */
void aq_deferred_settle(void);
/* A context is gone: credit what was freed in it, due or not. */
void aq_deferred_drop(int device, uint64_t owner);
/* In a forked child. */
void aq_deferred_forget(void);

#endif
