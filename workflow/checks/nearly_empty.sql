-- title: Answers with fewer than 16 supervised tokens
-- unit: share
-- limit: 0.10
-- reused: apart
-- advice: Look at the examples. An empty think block and a word say that the chat template and the thinking setting don't
--   fit the model, or that the server is broken: ask it by hand, and compare the prompt with the model card's. Answers that
--   end in `length` were cut: raise sampling.max_new_tokens, or model.context where prompts are long.
SELECT avg((completion_tokens < 16)::INTEGER) FROM answers;

-- examples:
SELECT a.prompt_id, a.finish_reason || ' after ' || a.completion_tokens || ' tokens: ' || c.text
FROM (SELECT answers.* FROM answers WHERE completion_tokens < 16 ORDER BY conversation_id LIMIT 3) a
JOIN completions c USING (conversation_id, turn)
ORDER BY a.conversation_id;
