-- title: Ok completions without a training row, and training rows without one
-- unit: rows
-- limit: 0
-- advice: Run again: a lost tokens file is made from its completions without generating.
SELECT count(*)
FROM answers a FULL JOIN training_rows t USING (conversation_id, turn)
WHERE a.prompt_id IS NULL OR t.prompt_id IS NULL;

-- examples:
SELECT coalesce(a.prompt_id, t.prompt_id), CASE WHEN t.prompt_id IS NULL THEN 'no training row' ELSE 'no completion' END
FROM answers a FULL JOIN training_rows t USING (conversation_id, turn)
WHERE a.prompt_id IS NULL OR t.prompt_id IS NULL ORDER BY conversation_id LIMIT 3;
