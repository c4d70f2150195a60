/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/outputs.h"

#include <stdlib.h>
#include <string.h>

bool aq_outputs_keep(struct aq_outputs *outputs, void *place, size_t bytes)
{
	if (!place || !bytes)
		return true;
	void *was = outputs->count < AQ_OUTPUTS_MAX ? malloc(bytes) : NULL;
	if (!was)
		return false;
	memcpy(was, place, bytes);
	outputs->kept[outputs->count].place = place;
	outputs->kept[outputs->count].was = was;
	outputs->kept[outputs->count++].bytes = bytes;
	return true;
}

void aq_outputs_put_back(const struct aq_outputs *outputs)
{
	for (unsigned i = 0; i < outputs->count; i++)
		/* memory that was not written may not be writable */
		if (memcmp(outputs->kept[i].place, outputs->kept[i].was, outputs->kept[i].bytes))
			memcpy(outputs->kept[i].place, outputs->kept[i].was, outputs->kept[i].bytes);
}

void aq_outputs_forget(struct aq_outputs *outputs)
{
	for (unsigned i = 0; i < outputs->count; i++)
		free(outputs->kept[i].was);
	outputs->count = 0;
}
