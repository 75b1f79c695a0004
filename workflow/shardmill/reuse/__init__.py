"""Reuse between builds: rows of older builds that are still right are taken over instead of being paid for again.

A row is named by its `prompt_id`: the prompt's ids, model, revision, sampling and all stop ids (identity.prompt_id).
Under the same name it is still right when its length agrees with the new limits (`limits`). Older builds lie beside
this one or in the same bucket (`sources`); which of their rows are still right is written once a run into an index
under run/reuse/ (`index`), and a generate job looks its prompts up there before it asks a server (`lookup`).
"""
