-- title: Training rows whose ids are not the prompt's and the answer's, unchanged
-- unit: rows
-- limit: 0
-- advice: The file was not written by this version's tokenize step, or was changed since: delete it, and run again.
SELECT count(*) FILTER (t.ids_hash <> a.ids_hash OR t.prompt_len <> a.prompt_ids_len)
FROM training_rows t JOIN answers a USING (conversation_id, turn);

-- examples:
SELECT t.prompt_id, 'conversation ' || conversation_id || ', turn ' || turn
FROM training_rows t JOIN answers a USING (conversation_id, turn)
WHERE t.ids_hash <> a.ids_hash OR t.prompt_len <> a.prompt_ids_len ORDER BY conversation_id LIMIT 3;
