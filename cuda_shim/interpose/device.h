/* SPDX-License-Identifier: Apache-2.0 */
/* The devices of the process, and which of them are granted. */
#ifndef AQ_INTERPOSE_DEVICE_H
#define AQ_INTERPOSE_DEVICE_H

#include <stdbool.h>

#include "cuda_abi.h"
#include "region/limits.h"

#define AQ_MAX_ORDINALS 64
#define AQ_NO_ORDINAL (-1)

/* Learn the devices of the process and which of them are granted. After cuInit. */
CUresult aq_devices_learn(struct aq_limits *limits);
/* Has the process only one, granted or not? */
bool aq_device_is_only(void);
/* Position in the limits of a CUDA device, by its UUID. */
int aq_device_of(CUdevice ordinal);
/* The UUID as NVML spells it, or NULL for a device that is not granted. */
const char *aq_device_uuid(int device);

#endif
