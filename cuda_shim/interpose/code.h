/* SPDX-License-Identifier: Apache-2.0 */
/* Code and variables that a program loads use device memory, and no call reports how much: measured around the calls that load. */
#ifndef AQ_INTERPOSE_CODE_H
#define AQ_INTERPOSE_CODE_H

#include <stdbool.h>
#include <stdint.h>

#include "account/account.h"
#include "account/map.h"
#include "cuda_abi.h"
#include "interpose/context.h"

#define AQ_NO_IMAGE UINT64_MAX

/* Before a call that may load. */
struct aq_moment {
	uint64_t free_bytes;      /* of the device, for all processes */
	uint64_t container_bytes; /* charged to the container */
};

/* Look at the current context's device. Learn the baseline first: it is the process before its first load. */
CUresult aq_code_look(int device, struct aq_moment *moment);
void aq_code_learn_baseline(int device);

enum aq_code_fit {
	AQ_CODE_FITS,
	AQ_CODE_TOO_LARGE, /* charged, past the limit: give it back and uncharge, or keep it charged */
	AQ_CODE_UNKNOWN,   /* the driver did not report what is free; charged are the bytes that were found otherwise */
};

/* What a call took. */
struct aq_code_growth {
	uint64_t bytes;       /* charged */
	uint64_t doubt_bytes; /* that the device lost besides: a neighbour's, or variables that the image does not show */
};

/* After the call: charge what it took. `image_bytes` bounds that where the driver does not say which process took it. */
enum aq_code_fit aq_code_charge(uint64_t image_bytes, int device, const struct aq_moment *before, struct aq_code_growth *growth);
/* Remember a charge until the handle is unloaded, or its context ends. False without memory to record it. */
bool aq_code_hold(uint64_t handle, const struct aq_place *place, uint64_t bytes);

/* Around a call that unloads: the handle leaves the records before the driver may give it out again. */
struct aq_code_held {
	struct aq_entry entry[AQ_MAX_DEVICES];
	int device;              /* of the current context, if code is charged there; else AQ_NO_DEVICE */
	struct aq_moment before; /* on that device */
};
void aq_code_unloading(uint64_t handle, struct aq_code_held *held);
void aq_code_unloaded(const struct aq_code_held *held, bool unloaded);
/* The same for code without a handle in the records, after it was unloaded: uncharge it, but for what its context keeps. */
void aq_code_give_back(const struct aq_place *place, uint64_t bytes);

/* A context of the device began: the old baseline of the process no longer holds. */
void aq_code_context_begun(int device);
/* A context has ended, with the code in it. `owner` as in struct aq_place. */
void aq_code_context_gone(int device, uint64_t owner);

/* In a forked child. */
void aq_code_forget(void);

#endif
