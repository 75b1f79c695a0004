-- title: Prompts with residue of a chat page: its buttons' words, its error messages, its HTML
-- unit: share
-- needs: prompts
-- scope: pilot, build
-- advice: Texts go to the model as they are (docs/reading.md). Look at the examples, and clean the dataset if there are many.
WITH found AS (
    SELECT regexp_extract(
        messages,
        'Share Prompt|Copy code|Too many requests in 1 hour|<div class=\\"(markdown|prose|flex)[^>]*>'
    ) AS residue
    FROM prompts
)
SELECT avg((residue != '')::INTEGER) FROM found;

-- examples:
SELECT prompt_id, '… ' || residue || ' …'
FROM (
    SELECT prompt_id, conversation_id, regexp_extract(
        messages,
        'Share Prompt|Copy code|Too many requests in 1 hour|<div class=\\"(markdown|prose|flex)[^>]*>'
    ) AS residue
    FROM prompts
)
WHERE residue != '' ORDER BY conversation_id LIMIT 3;
