"""`qada tune`: the cost of settings on a user's own model and text, and a choice by a budget."""
