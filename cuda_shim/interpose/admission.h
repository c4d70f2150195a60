/* SPDX-License-Identifier: Apache-2.0 */
/* The right to launch: every reason to wait for it, one after the other.
 *
 * What is in flight is bounded, so that a pause or a lower limit takes effect soon; then a pause, the container's time slot and its bucket
 * have to admit the launch. Every wait has an end, for any values in the region and from the device. */
#ifndef AQ_INTERPOSE_ADMISSION_H
#define AQ_INTERPOSE_ADMISSION_H

#include <stdbool.h>
#include <stdint.h>

#include "interpose/work.h"

/* Wait for the right to launch that much work, and pay for it. False where the driver will refuse the launch: there is no context. */
bool aq_admit(int device, const struct aq_work *work, int64_t batch_ns);

/* How much a thread pays at once, or for one launch if that costs more. */
int64_t aq_admission_batch(int device);

/* Wait until few enough launches that are not known are in flight: what they take is not known, so it has to be seen. */
void aq_admission_await_measurement(int device, uint32_t most);

#endif
