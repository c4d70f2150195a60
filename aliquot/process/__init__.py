# SPDX-License-Identifier: Apache-2.0
"""What each Aliquot program begins with: its settings, its log lines, and where its cluster's API is. Imports the contract only."""
