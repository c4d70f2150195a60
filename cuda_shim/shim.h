/* SPDX-License-Identifier: Apache-2.0 */
/* The CUDA side of the shim as a whole: whether this process is limited, and the macro that every wrapper begins with. */
#ifndef AQ_SHIM_H
#define AQ_SHIM_H

#include <stdatomic.h>
#include <stdbool.h>

#include "interpose/driver.h"

enum aq_mode {
	AQ_UNDECIDED = 0, /* cuInit was not called yet */
	AQ_LIMITED,
	AQ_PASSING,       /* cannot limit, and the policy allows the program to run */
	AQ_REFUSING,      /* cannot limit, and the policy then allows no GPU */
};

extern _Atomic int aq_mode_word;

enum aq_mode aq_decide(void);

static inline enum aq_mode aq_mode(void)
{
	enum aq_mode mode = (enum aq_mode)atomic_load_explicit(&aq_mode_word, memory_order_acquire);

	return __builtin_expect(mode == AQ_LIMITED, 1) ? mode : aq_decide();
}

/* The first statement of a wrapper: `call` is the same call to the driver. Past it, the process is limited. */
#define AQ_LIMITED_OR_RETURN(call)                                                                    \
	do {                                                                                          \
		enum aq_mode mode_ = aq_mode();                                                       \
		if (__builtin_expect(mode_ != AQ_LIMITED, 0))                                         \
			return mode_ == AQ_REFUSING ? CUDA_ERROR_NOT_INITIALIZED : aq_cuda.call;      \
	} while (0)

/* Before memory of a device is refused: take back what the driver, this process's pools and dead siblings no longer use. True = try
 * again. */
bool aq_reclaim(int device);
/* Uncharge dead siblings, for a caller that reports free memory; at most a few times a second. */
void aq_reclaim_siblings(void);

/* cuInit, in full. */
CUresult aq_start(unsigned int flags);

#endif
