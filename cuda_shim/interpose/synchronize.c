/* SPDX-License-Identifier: Apache-2.0 */
/* Where the program waits for the device. There the driver gives back what was freed in stream order, above what a pool has to keep. If the
 * program sleeps from then on, nothing else would uncharge that, and its siblings in the container would be refused free memory. Nor would
 * anything count its launches. */
#include "interpose/deferred.h"
#include "interpose/driver.h"
#include "interpose/pace.h"
#include "interpose/reservoir.h"
#include "shim.h"

static CUresult synchronized(CUresult result)
{
	aq_pace_count();
	if (result == CUDA_SUCCESS) {
		aq_deferred_settle();
		aq_reservoirs_synchronized();
	}
	return result;
}

#define SYNCHRONIZE_HOOK(name, parameter, argument)                \
	CUresult name(parameter)                                   \
	{                                                          \
		AQ_LIMITED_OR_RETURN(name(argument));              \
		return synchronized(aq_cuda.name(argument));       \
	}

SYNCHRONIZE_HOOK(cuStreamSynchronize, CUstream stream, stream)
SYNCHRONIZE_HOOK(cuStreamSynchronize_ptsz, CUstream stream, stream)
SYNCHRONIZE_HOOK(cuEventSynchronize, CUevent event, event)
SYNCHRONIZE_HOOK(cuCtxSynchronize, void, )
SYNCHRONIZE_HOOK(cuCtxSynchronize_v2, CUcontext context, context)
