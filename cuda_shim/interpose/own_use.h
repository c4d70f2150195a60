/* How much of a device the container's processes really use, as the driver measures it. */
#ifndef AQ_INTERPOSE_OWN_USE_H
#define AQ_INTERPOSE_OWN_USE_H

#include <stdbool.h>
#include <stdint.h>

#include "region/region.h"

/* The share of the device's SM time since the last call, 65536 = all of it. False when the driver has no new figure, or cannot tell
 * whose work it is: when it names an MPS server for its clients, on MIG instances, or where neither the agent nor the pid namespace names
 * our processes (interpose/naming.h). */
bool aq_own_use(const struct aq_region *region, const char *uuid, int device, uint32_t *share_q16);

/* In a forked child. */
void aq_own_use_forget(void);

#endif
