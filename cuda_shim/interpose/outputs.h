/* SPDX-License-Identifier: Apache-2.0 */
/* What the driver writes for the program in a call that may be refused after it succeeded: saved before the call, restored by the refusal.
 * The driver writes in place, so on success and on its own errors the program finds what the driver left. */
#ifndef AQ_INTERPOSE_OUTPUTS_H
#define AQ_INTERPOSE_OUTPUTS_H

#include <stdbool.h>
#include <stddef.h>

#define AQ_OUTPUTS_MAX 4

struct aq_outputs {
	unsigned count;
	struct {
		void *place;
		void *was;
		size_t bytes;
	} kept[AQ_OUTPUTS_MAX];
};

/* `place` may be NULL: then there is no output to save. False when there is no memory to save it; then the call must not be made. */
bool aq_outputs_keep(struct aq_outputs *outputs, void *place, size_t bytes);
void aq_outputs_put_back(const struct aq_outputs *outputs);
/* Always, at the end. */
void aq_outputs_forget(struct aq_outputs *outputs);

#endif
