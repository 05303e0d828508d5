# Writes OUT, a C++ file with the text of each of FILES.
set(text "#include \"recipes/config/recipe_store.h\"\n\nnamespace mbridge::recipes {\n\nconst EmbeddedRecipe kEmbeddedRecipes[] = {\n")
foreach(file ${FILES})
  file(READ ${file} yaml)
  get_filename_component(name ${file} NAME)
  string(APPEND text "    {\"${name}\", R\"yaml(${yaml})yaml\"},\n")
endforeach()
string(APPEND text "    {nullptr, nullptr}};\n\n}  // namespace mbridge::recipes\n")
file(WRITE ${OUT} "${text}")
