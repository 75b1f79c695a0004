-- title: Training rows whose ids, mask and lengths disagree
-- unit: rows
-- limit: 0
-- advice: The file was not written by this version's tokenize step, or was changed since: delete it, and run again.
SELECT count(*) FILTER (ids_len <> mask_len OR ids_len <> seq_len) FROM training_rows;

-- examples:
SELECT prompt_id, ids_len || ' ids, ' || mask_len || ' in the mask, seq_len ' || seq_len
FROM training_rows WHERE ids_len <> mask_len OR ids_len <> seq_len ORDER BY conversation_id LIMIT 3;
