-- title: Prompts that are asked more than once
-- unit: share
-- limit: 0.02
-- severity: warning
-- advice: Conversations can begin alike, so a few are well. Many say that the dataset repeats itself in ways that
--   prompts.dedupe can't see.
SELECT 1 - count(DISTINCT prompt_id) / count(*) FROM completions WHERE prompt_id IS NOT NULL;

-- examples:
SELECT prompt_id, count(*) || ' times'
FROM completions WHERE prompt_id IS NOT NULL GROUP BY prompt_id HAVING count(*) > 1
ORDER BY count(*) DESC, prompt_id LIMIT 3;
