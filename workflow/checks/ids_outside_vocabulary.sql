-- title: Answers or prompts with an id outside the vocabulary
-- unit: rows
-- limit: 0
-- advice: The server's vocabulary is not this tokenizer's: compare model.name at the servers with the config's.
SELECT count(*) FILTER (lowest_id < 0 OR highest_id >= vocab_size) FROM answers, settings;

-- examples:
SELECT prompt_id, 'ids ' || lowest_id || ' to ' || highest_id || ', vocabulary ' || vocab_size
FROM answers, settings WHERE lowest_id < 0 OR highest_id >= vocab_size ORDER BY conversation_id LIMIT 3;
