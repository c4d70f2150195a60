/* Where a call's memory counts: the device behind the calling thread's context, and what the memory dies with. */
#ifndef AQ_INTERPOSE_CONTEXT_H
#define AQ_INTERPOSE_CONTEXT_H

#include <stdbool.h>
#include <stdint.h>

#include "account/account.h"
#include "account/map.h"
#include "cuda_abi.h"

#define AQ_MAX_ORDINALS 64

struct aq_place {
	int device;       /* position in the limits, or AQ_NO_DEVICE */
	CUdevice ordinal;
	uint64_t owner;   /* a context made by cuCtxCreate; 0 = the device's primary context */
};

/* Learn the devices of the process and which of them are granted. After cuInit. */
CUresult aq_devices_learn(void);
/* Has the process only one, granted or not? */
bool aq_device_is_only(void);
/* Position in the limits of a CUDA device, by its UUID. */
int aq_device_of(CUdevice ordinal);
/* The UUID as NVML spells it, or NULL for a device that is not granted. */
const char *aq_device_uuid(int device);

/* The calling thread's place. False when it has no context: the driver will say so. */
bool aq_place_current(struct aq_place *place);
/* The place of a stream: its context's, or the thread's for the default streams. */
bool aq_place_of_stream(CUstream stream, struct aq_place *place);
/* Its device alone, for hot paths; AQ_NO_DEVICE when none is granted. Where the process has one device, the driver is asked for the
 * thread's context once, and again when one began or ended since. */
int aq_device_of_stream(CUstream stream);

/* The context of a stream, the thread's for the default streams; NULL when there is none. */
CUcontext aq_context_of_stream(CUstream stream);
/* Make a context current, unless it is. False when the driver refuses; else aq_context_leave has to follow, with what was learned. */
bool aq_context_enter(CUcontext context, bool *pushed);
void aq_context_leave(bool pushed);

/* A context that is about to end, or may be. Events in it must not be asked from then on, for it goes with them while others look. */
struct aq_ending {
	int device;
	uint64_t owner;  /* as in struct aq_place */
	CUcontext green; /* not NULL: this green context alone, and not all that is its owner's */
};

static inline bool aq_ending_has(const struct aq_ending *ending, int device, uint64_t owner, CUcontext context)
{
	return ending->green ? context == ending->green : device == ending->device && owner == ending->owner;
}

#define AQ_NO_ORDINAL (-1)

/* The device that pays for memory at a location, AQ_NO_ORDINAL for the host's. Managed memory comes to a device from wherever it is, so it is
 * the current device's when it names none. CUDA_ERROR_NOT_SUPPORTED for locations that this shim does not know: they may be device memory. */
CUresult aq_place_of_location(const CUmemLocation *location, CUmemAllocationType type, CUdevice *ordinal);

/* In a forked child. */
void aq_contexts_forget(void);

#endif
