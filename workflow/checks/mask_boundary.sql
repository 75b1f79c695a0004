-- title: Training rows whose mask is not 0 over the prompt and 1 over the answer
-- unit: rows
-- limit: 0
-- advice: The file was not written by this version's tokenize step, or was changed since: delete it, and run again.
SELECT count(*) FILTER (first_supervised <> prompt_len + 1 OR supervised <> mask_len - prompt_len OR highest_mask > 1)
FROM training_rows;

-- examples:
SELECT prompt_id, 'prompt ' || prompt_len || ', first 1 at ' || first_supervised || ', ' || supervised || ' in all'
FROM training_rows
WHERE first_supervised <> prompt_len + 1 OR supervised <> mask_len - prompt_len OR highest_mask > 1
ORDER BY conversation_id LIMIT 3;
